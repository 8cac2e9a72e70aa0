"""The command line of the operator."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmcache_operator.__main__ import main
from lmcache_operator.specs.names import GROUP, PEERS, REMOTE, secret_name
from lmcache_store.common.logs import formatter
from tests.harness.operator.model import cluster

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))


def has_shards(manifest: dict[str, Any]) -> bool:
    """Whether the cluster has managed shards, for which the operator creates a Secret."""
    return "managed" in tiers_of(manifest).get("remote", {})


def has_peers(manifest: dict[str, Any]) -> bool:
    """Whether the engines are peers, for which the operator creates a Secret."""
    return "peers" in tiers_of(manifest)


def has_groups(manifest: dict[str, Any]) -> bool:
    """Whether engines spread over several nodes, for which the operator creates a Secret."""
    return manifest["kind"] == "LMCacheCluster" and manifest["spec"].get("engine", {}).get("nodes", 1) > 1


def tiers_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """Tiers of a cluster; none for another object."""
    return dict(manifest["spec"]["tiers"]) if manifest["kind"] == "LMCacheCluster" else {}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_contain_the_secrets_and_claims_that_they_use(example, capsys):
    """Otherwise the first example that a user tries would wait forever."""
    texts = [file.read_text() for file in example.parent.glob("*.yaml")]
    objects = [manifest for text in texts for manifest in yaml.safe_load_all(text)]
    main(["render", "-f", str(example)])
    rendered = capsys.readouterr().out
    for kind, field in (("Secret", "secretName"), ("PersistentVolumeClaim", "claimName")):
        existing = {manifest["metadata"]["name"] for manifest in objects if manifest["kind"] == kind}
        for has_secret, component in ((has_shards, REMOTE), (has_peers, PEERS), (has_groups, GROUP)):
            existing |= {
                secret_name(each["metadata"]["name"], component, "") for each in objects if has_secret(each)
            }
        assert set(re.findall(rf"{field}: (\S+)", rendered)) <= existing


@pytest.mark.parametrize(("name", "num_cpus"), [("cpu", 0.8), ("qwen3-0.6b", 2.0)])
def test_small_examples_say_what_they_request(name, num_cpus, capsys) -> None:
    """On a node of kind with two CPUs, Kubernetes itself requests 0.95 of them, and the operator 0.1."""
    file = ROOT / "examples" / f"{name}.yaml"
    main(["render", "-f", str(file)])
    objects = {manifest["kind"]: manifest for manifest in yaml.safe_load_all(capsys.readouterr().out)}
    pod = objects["StatefulSet"]["spec"]["template"]["spec"]
    sidecars = [each for each in pod["initContainers"] if each.get("restartPolicy") == "Always"]
    requests = [each["resources"].get("requests", {}) for each in (*sidecars, *pod["containers"])]
    cpus = sum(number(each.get("cpu", 0)) for each in requests)
    gigabytes = sum(number(each.get("memory", 0)) for each in requests) / 2**30
    said = f"requests {cpus:.1f} CPUs and {gigabytes:.1f} GiB of memory"
    assert said in " ".join(file.read_text().replace("#", "").split())
    assert cpus <= num_cpus
    assert gigabytes <= 9


def number(amount: str | int) -> float:
    """An amount of Kubernetes, such as 100m or 2Gi."""
    units = {"m": 1e-3, "Mi": 2.0**20, "Gi": 2.0**30}
    matched = re.fullmatch(r"([0-9.]+)(\D*)", str(amount))
    assert matched
    return float(matched[1]) * units.get(matched[2], 1)


def test_monitoring_example_selects_the_engine_pods(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = yaml.safe_load((ROOT / "examples" / "monitoring.yaml").read_text())["spec"]
    main(["render", "-f", str(ROOT / "examples" / "qwen3-0.6b.yaml")])
    objects = {manifest["kind"]: manifest for manifest in yaml.safe_load_all(capsys.readouterr().out)}
    template = objects["StatefulSet"]["spec"]["template"]
    assert monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert set(monitor["podTargetLabels"]) <= template["metadata"]["labels"].keys()
    containers = template["spec"]["containers"] + template["spec"]["initContainers"]
    ports = {port["name"] for container in containers for port in container.get("ports", ())}
    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} <= ports


def test_autoscaling_example_targets_its_cluster() -> None:
    folder = ROOT / "examples" / "autoscaling"
    cluster, hpa = (yaml.safe_load((folder / f"{name}.yaml").read_text()) for name in ("cluster", "hpa"))
    target = {key: cluster[key] for key in ("apiVersion", "kind")} | {"name": cluster["metadata"]["name"]}
    assert hpa["spec"]["scaleTargetRef"] == target


def test_render_accepts_the_image_options_of_run(capsys: pytest.CaptureFixture[str]) -> None:
    example = str(ROOT / "examples" / "qwen3-8b.yaml")
    arguments = ["--engine-image", "e:1", "--sidecar-image", "s:1"]
    assert main(["render", "-f", example, *arguments]) == 0
    assert {"image: e:1", "image: s:1"} <= {*map(str.strip, capsys.readouterr().out.splitlines())}


def test_render_leaves_ids_out_that_the_platform_assigns(tmp_path, capsys):
    file, security = tmp_path / "cluster.yaml", {"runAsUser": 1000800000}
    engine = {"prefill": {}, "podTemplate": {"spec": {"securityContext": security}}}
    remote = {"managed": {"memoryPerShard": "1Gi"}}
    file.write_text(yaml.safe_dump(cluster(engine=engine, router={}, tiers={"remote": remote, "peers": {}})))
    main(["render", "-f", str(file), "--assigned-ids"])
    objects = yaml.safe_load_all(capsys.readouterr().out)
    pods = {
        each["metadata"]["name"]: each["spec"]["template"]
        for each in objects
        if "template" in each.get("spec", ())
    }
    assert pods.keys() == {"demo-engine", "demo-prefill-engine", "demo-remote", "demo-router"}
    for name, pod in pods.items():
        (ids,) = re.findall(r"'(?:runAs(?:User|Group)|fsGroup)': \d+", str(pod)) or [""]
        assert ids == ("'runAsUser': 1000800000" if name.endswith("engine") else ""), name


@pytest.mark.parametrize(
    ("addresses", "vllm", "sglang", "router"),
    [
        ("10.0.0.1", [], ["0.0.0.0"], ["0.0.0.0"] * 2),
        ("fd00::1", ["::"], ["::"], ["::"] * 2),
        ("10.0.0.1,fd00::1", ["::"], ["0.0.0.0"], ["::"] * 2),
        ("fd00::1,10.0.0.1", ["::"], ["::"], ["::"] * 2),
    ],
)
def test_render_lets_servers_listen_in_the_families_of_pods(
    addresses, vllm, sglang, router, tmp_path, capsys
):
    file, hosts = tmp_path / "cluster.yaml", {}
    for kind in ("vLLM", "SGLang"):
        file.write_text(yaml.safe_dump(cluster(engine={"kind": kind}, router={"policy": "RoundRobin"})))
        assert main(["render", "-f", str(file), "--pod-ips", addresses]) == 0
        for each in yaml.safe_load_all(capsys.readouterr().out):
            if each["kind"] in ("StatefulSet", "Deployment"):
                arguments = "\n".join(each["spec"]["template"]["spec"]["containers"][0]["args"])
                hosts[each["kind"], kind] = re.findall(
                    "^--(?:prometheus-)?host=(.*)$", arguments, re.MULTILINE
                )
    assert (hosts["StatefulSet", "vLLM"], hosts["StatefulSet", "SGLang"]) == (vllm, sglang)
    assert hosts["Deployment", "vLLM"] == hosts["Deployment", "SGLang"] == router


def test_render_prints_the_secrets_of_a_cluster_that_is_referred_to(tmp_path, capsys):
    reference = {"clusterRef": {"name": "kv"}}
    referring = cluster(tiers={"peers": reference, "remote": reference})
    owner = cluster(
        tiers={"peers": {}, "remote": {"managed": {"memoryPerShard": "1Gi"}}},
        engine={"prefill": {}},
        router={},
    )
    owner["metadata"] |= {"name": "kv", "uid": "uid-of-kv"}
    (tmp_path / "both.yaml").write_text(yaml.safe_dump_all([referring, owner]))
    assert main(["render", "-f", str(tmp_path / "both.yaml")]) == 0
    rendered = list(yaml.safe_load_all(capsys.readouterr().out))
    engines = [each for each in rendered if each["metadata"]["name"].endswith("-engine")]
    templates = {each["metadata"]["name"]: str(each) for each in engines if each["kind"] == "StatefulSet"}
    assert templates.keys() == {"demo-engine", "kv-engine", "kv-prefill-engine"}
    for template in templates.values():
        assert {"kv-peers-uid-of-kv", "kv-remote-uid-of-kv"} <= {*re.findall(r"[-\w]+", template)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: LMCacheCluster\nmetadata: {name: x}\nspec: {}\n", "spec.tiers: is required"),
        ("kind: LMCacheCluster\nspec: {}\n", "metadata: must be an object"),
        (
            "kind: LMCacheCluster\nmetadata: {name: x}\nspec: {tiers: {memory: {szie: 1Gi}}}\n",
            "spec.tiers.memory.szie: is not a known field; did you mean 'size'?",
        ),
        ("kind: Service\n", "contains no LMCacheCluster"),
        ("a: [", "while parsing"),
        ("a: " + "[" * 2000 + "]" * 2000, "is nested too deeply"),
    ],
)
def test_render_reports_file_and_mistake(text, message, tmp_path, capsys):
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    assert main(["render", "-f", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"{file}: ")
    assert message in captured.err


def bomb(repeated: str) -> str:
    """A file of aliases that each repeat the one before, and that would have 2^32 values."""
    levels = (f"a{n}: &a{n} {repeated.format(f'*a{n - 1}')}" for n in range(1, 33))
    return "\n".join(["a0: &a0 {x: y}", *levels])


@pytest.mark.parametrize("command", ["render", "inject"])
@pytest.mark.parametrize(
    "text",
    [
        "a: &a {b: *a}",
        bomb("[{0}, {0}]"),
        bomb("{{<<: [{0}, {0}]}}"),
        f"a: &a {'x' * 1000}\nb: [{'*a, ' * 2000}]",
    ],
)
def test_aliases_of_a_file_are_limited(command, text, tmp_path, capsys):
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    assert main([command, "-f", str(file)]) == 2
    assert "aliases repeat too many values" in capsys.readouterr().err


def test_json_lines_have_the_traceback() -> None:
    record = logging.LogRecord("a", logging.ERROR, "f", 1, "b", (), (ValueError, ValueError("x"), None))
    assert "ValueError: x" in json.loads(formatter("json").format(record))["exc_info"]
