"""``kubectl lmcache curve``: the hit curve of a tier as text."""

import contextlib
import copy
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lmcache_cli.__main__ import main
from lmcache_cli.commands.curve import curve_text
from lmcache_operator.errors import NoCurveError

ROOT = Path(__file__).resolve().parents[3]
REASON = "108Gi per pod instead of 64Gi: 16.2 percentage points more hits, <0.51 USD/h> of GPU time"


def point(size: str, hit: float, net: float) -> dict[str, str]:
    return {
        "size": size, "hit": f"{hit}", "low": f"{hit - 0.02:.2f}", "high": f"{hit + 0.02:.2f}",
        "netPerHour": f"{net}",
    }  # fmt: skip


CLUSTER: dict[str, Any] = {
    "apiVersion": "lmcache.io/v1alpha1", "kind": "LMCacheCluster",
    "metadata": {"name": "llama", "namespace": "demo"},
    "status": {
        "autoscaling": {
            "observedAt": "2026-11-22T18:00:00Z", "samples": 412334, "window": "24h",
            "memory": {
                "current": "64Gi", "recommended": "108Gi", "next": "108Gi", "reason": REASON,
                "curve": [
                    point("512Gi", 0.61, -2.4), point("16Gi", 0.2, -0.93), point("65536Mi", 0.42, 0),
                    point("108Gi", 0.58, 0.16),
                ],
            },
        }
    },
}  # fmt: skip


def changed(field: str, value: Any = None) -> dict[str, Any]:
    """The cluster with another field of its memory tier. None: without it."""
    resource = copy.deepcopy(CLUSTER)
    memory = resource["status"]["autoscaling"]["memory"]
    memory.pop(field) if value is None else memory.update({field: value})
    return resource


def write(tmp_path: Path, document: Any) -> list[str]:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(document))
    return ["curve", "-f", str(file)]


def test_text_marks_present_and_recommended_size() -> None:
    lines = curve_text(CLUSTER, "memory", 100).splitlines()
    rows = {row[1]: row for line in lines if (row := re.match(r"[> ] +(\w+i) .*% .*", line))}
    assert list(rows) == ["16Gi", "65536Mi", "108Gi", "512Gi"]
    present, recommended = rows["65536Mi"][0], rows["108Gi"][0]
    assert present.startswith(">")
    assert present.endswith("+0.000  present")
    assert re.search(r" 58\.0 %  56\.0-60\.0 .* \+0\.160  recommended$", recommended)
    bars = [row[0].count("=") for row in rows.values()]
    assert bars == sorted(bars)
    assert bars[-1] == round(41 * 0.59 / 0.63)  # 41 of 100 columns are left for bars
    assert lines[-1] == REASON


@pytest.mark.parametrize("width", [20, 80, 200])
def test_text_fits_the_width(width: int) -> None:
    widest = max(map(len, curve_text(CLUSTER, "memory", width).splitlines()))
    assert widest <= max(width, 80)


def test_size_that_is_present_and_recommended_is_marked_once() -> None:
    text = curve_text(changed("recommended", "64Gi"), "memory", 80)
    assert text.count("present") == 1
    assert "present and recommended" in text


def test_remote_curve_matches_sizes_to_numbers_of_shards() -> None:
    tiers = {"memory": {"size": "64Gi"}, "remote": {"managed": {"memoryPerShard": "108Gi", "shards": 1}}}
    remote = {"current": 1, "recommended": 3, "next": 2, "reason": REASON}
    remote["curve"] = [point("108Gi", 0.3, 0), point("216Gi", 0.4, 0.1), point("324Gi", 0.45, 0.11)]
    spec = {"model": {"name": "m"}, "engine": {}, "tiers": tiers}
    cluster = CLUSTER | {"spec": spec, "status": {"autoscaling": {"remote": remote}}}
    rows = [line.split() for line in curve_text(cluster, "remote", 80).splitlines() if " % " in line]
    marks = [(row[row[0] == ">"], row[-1]) for row in rows]
    assert marks == [("108Gi", "present"), ("216Gi", "+0.100"), ("324Gi", "recommended")]


@pytest.mark.parametrize(
    ("cluster", "tier", "message"),
    [
        ({**CLUSTER, "status": {}}, "memory", "status.autoscaling is empty.*mode is Off"),
        (CLUSTER, "remote", "its remote tier has no curve; available: --tier memory"),
        (changed("curve"), "memory", f"its memory tier has no curve yet: {REASON}"),
        (changed("current"), "memory", "status.autoscaling is from another version: .*current"),
    ],
)
def test_missing_curve_raises_error_with_reason(cluster: dict[str, Any], tier: str, message: str) -> None:
    with pytest.raises(NoCurveError, match=f"^llama: {message}"):
        curve_text(cluster, tier, 80)


@given(
    st.recursive(st.none() | st.integers() | st.text(max_size=4), lambda inner: st.lists(inner, max_size=2))
)
def test_unexpected_status_values_raise_no_other_error(value: Any) -> None:
    """Another version may have written the status, or a user may have edited it."""
    for field in ("samples", "memory", "current", "curve", "reason"):
        resource = copy.deepcopy(CLUSTER)
        autoscaling = resource["status"]["autoscaling"]
        (autoscaling if field in autoscaling else autoscaling["memory"])[field] = value
        with contextlib.suppress(NoCurveError):
            assert curve_text(resource, "memory", 80)


def test_curve_reads_a_list_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is a list as ``kubectl get -o yaml`` prints it."""
    listed = write(tmp_path, {"kind": "List", "items": [{"kind": "Pod"}, CLUSTER]})
    assert main([*listed, "llama"]) == 0
    assert "demo/llama: the memory tier" in capsys.readouterr().out


def test_curve_of_an_unknown_cluster_is_an_error(tmp_path, capsys):
    assert main([*write(tmp_path, CLUSTER), "other"]) == 2
    assert "cluster.yaml: contains no LMCacheCluster other" in capsys.readouterr().err


def test_kubectl_finds_the_plugin() -> None:
    """``kubectl lmcache`` runs the program kubectl-lmcache on PATH."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["kubectl-lmcache"] == "lmcache_cli.__main__:main"
