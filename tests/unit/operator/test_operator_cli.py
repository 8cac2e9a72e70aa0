"""The command line."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from lmcache_operator.__main__ import main
from lmcache_operator.specs.names import remote_name

from lmcache.logging import formatter

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_render(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = example.read_text()
    clusters = [found for found in yaml.safe_load_all(text) if found["kind"] == "LMCacheCluster"]
    assert main(["render", "-f", str(example)]) == (0 if clusters else 2)
    kinds = [rendered["kind"] for rendered in yaml.safe_load_all(capsys.readouterr().out)]
    engine = [
        "ServiceAccount",
        "ConfigMap",
        "Service",
        "Service",
        "NetworkPolicy",
        "PodDisruptionBudget",
        *(["ResourceClaimTemplate"] if "deviceClassName" in text else []),
        "StatefulSet",
        "LMCacheProfile",
    ]
    shards = ["ConfigMap", "Service", "NetworkPolicy", "PodDisruptionBudget", "StatefulSet"]
    has_engine = any("engine" in cluster["spec"] for cluster in clusters)
    assert kinds == (engine if has_engine else []) + (shards if any(map(has_shards, clusters)) else [])


def has_shards(found: dict[str, Any]) -> bool:
    """Then the operator makes a Secret."""
    remote = found["spec"]["tiers"].get("remote", {}) if found["kind"] == "LMCacheCluster" else {}
    return "managed" in remote


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_bring_the_secrets_that_they_need(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Else the first thing a user tries waits for ever."""
    texts = [file.read_text() for file in example.parent.glob("*.yaml")]
    objects = [found for text in texts for found in yaml.safe_load_all(text)]
    main(["render", "-f", str(example)])
    rendered = capsys.readouterr().out
    for kind, field in (("Secret", "secretName"), ("PersistentVolumeClaim", "claimName")):
        made = {found["metadata"]["name"] for found in objects if found["kind"] == kind}
        made |= {remote_name(found["metadata"]["name"]) for found in objects if has_shards(found)}
        assert set(re.findall(rf"{field}: (\S+)", rendered)) <= made


def test_the_example_of_monitoring_finds_the_pods(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = yaml.safe_load((ROOT / "examples" / "monitoring.yaml").read_text())["spec"]
    main(["render", "-f", str(ROOT / "examples" / "qwen3-0.6b.yaml")])
    objects = {found["kind"]: found for found in yaml.safe_load_all(capsys.readouterr().out)}
    template = objects["StatefulSet"]["spec"]["template"]
    assert monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert set(monitor["podTargetLabels"]) <= template["metadata"]["labels"].keys()
    containers = template["spec"]["containers"] + template["spec"]["initContainers"]
    ports = {port["name"] for container in containers for port in container.get("ports", ())}
    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} <= ports


def test_the_example_of_autoscaling_scales_the_cluster() -> None:
    cluster, hpa = (
        yaml.safe_load((ROOT / "examples" / "autoscaling" / name).read_text())
        for name in ("cluster.yaml", "hpa.yaml")
    )
    target = {key: cluster[key] for key in ("apiVersion", "kind")} | {"name": cluster["metadata"]["name"]}
    assert hpa["spec"]["scaleTargetRef"] == target


def test_render_takes_the_settings_of_run(capsys: pytest.CaptureFixture[str]) -> None:
    example = str(ROOT / "examples" / "qwen3-8b.yaml")
    arguments = ["--engine-image", "e:1", "--sidecar-image", "s:1"]
    assert main(["render", "-f", example, *arguments]) == 0
    output = capsys.readouterr().out
    assert "image: e:1" in output
    assert "image: s:1" in output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: LMCacheCluster\nmetadata: {name: x}\nspec: {}\n", "spec.tiers: is required"),
        ("kind: LMCacheCluster\nspec: {}\n", "metadata: must be an object"),
        ("kind: Service\n", "holds no LMCacheCluster"),
        ("a: [", "while parsing"),
        ("a: " + "[" * 2000 + "]" * 2000, "is nested too deeply"),
    ],
)
def test_render_says_what_is_wrong(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    assert main(["render", "-f", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"{file}: ")
    assert message in captured.err


def test_render_of_a_file_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", "-f", str(tmp_path / "none.yaml")]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "render"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert "default" in capsys.readouterr().out


def test_a_log_line_as_json() -> None:
    try:
        raise ValueError("x")
    except ValueError as error:
        record = logging.LogRecord("a", logging.ERROR, "f", 1, "%s %s", ("b", "c"), (ValueError, error, None))
    record.created = record.msecs = 0.0
    line = json.loads(formatter("json").format(record))
    assert (line["level"], line["logger"], line["message"]) == ("ERROR", "a", "b c")
    assert "ValueError: x" in line["exc_info"]
    assert line["time"] == "1970-01-01T00:00:00.000Z"
