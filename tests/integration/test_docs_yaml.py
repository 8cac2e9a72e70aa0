"""The YAML of the documentation is valid: objects, and parts of them, on a real API server."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from testing.kube.cluster import Cluster
from testing.kube.operator import CHART, ROOT
from tests.harness.commands.terminal import fields
from tests.harness.fences import Fence, fences, pages
from tests.harness.kube import new_namespace

pytestmark = [pytest.mark.kube, pytest.mark.rotating("file")]

FENCES = {str(fence): fence for page in pages() for fence in fences(page, "yaml")}
CLUSTER = yaml.safe_load((ROOT / "examples" / "qwen3-8b.yaml").read_text())
MANAGED = {"managed": {"memoryPerShard": "1Gi"}}
_, DEPLOYMENT = yaml.safe_load_all((ROOT / "examples" / "injection.yaml").read_text())
FOREIGN_KINDS = {"ClusterPolicy", "HTTPRoute", "PodMonitor", "ScaledObject"}
"""Kinds that this API server does not have."""
SPEC = {"model", "engine", "sidecar", "images", "tiers", "autoscaling", "clients"}
TIERS = {"memory", "disk", "remote", "admit"}
SHARDS = {"current", "previous", "until", "tls", "ca"}
"""Keys of the sidecar's list of shards."""
TENANTS = {"default", "named"}
"""Keys of the sidecar's list of tenants."""
VALUES = yaml.safe_load((CHART / "values.yaml").read_text()).keys()


def merged(base: Any, change: Any) -> Any:
    """A copy of ``base`` with the fields of ``change``; lists are replaced."""
    if not isinstance(base, dict) or not isinstance(change, dict):
        return copy.deepcopy(change)
    return {**base, **{name: merged(base.get(name), value) for name, value in change.items()}}


def whole(content: dict[str, Any]) -> dict[str, Any] | None:
    """The object that a fence shows, or shows a part of. None if it shows something else."""
    keys = content.keys()
    if keys & {"kind"} and content["kind"] != "Deployment":
        return content if content["kind"] not in FOREIGN_KINDS else None
    if "template" in content.get("spec", {}):
        return merged(DEPLOYMENT, content)
    if keys <= TIERS:
        content = {"tiers": content}
    if keys <= SPEC | TIERS and "observedAt" not in content.get("autoscaling", {}):
        content = {"spec": content}
    if content.keys() != {"spec"}:
        return None
    cluster = merged(CLUSTER, content)
    if "remote" in cluster["spec"].get("autoscaling", {}):
        cluster["spec"]["tiers"].setdefault("remote", MANAGED)
    assert isinstance(cluster, dict)
    return cluster


def contents(fence: Fence) -> Iterator[dict[str, Any]]:
    yield from filter(None, yaml.safe_load_all(fence.text))


def test_objects_are_admitted(plane: Cluster):
    objects_by_place = {
        f"{place} {i}": whole(part)
        for place, fence in FENCES.items()
        for i, part in enumerate(contents(fence))
    }
    objects = {place: copy.deepcopy(shown) for place, shown in objects_by_place.items() if shown}
    assert len(objects) > 12
    for number, shown in enumerate(objects.values()):
        shown["metadata"]["name"] = f"documented-{number}"
        shown["metadata"].pop("namespace", None)
    with new_namespace(plane, "documented") as namespace:
        flags = ("--dry-run=server", "--validate=strict", "--namespace", namespace, "--filename", "-")
        plane.kubectl("apply", *flags, stdin=yaml.safe_dump_all(objects.values()))


def test_everything_else_is_known(plane: Cluster, tmp_path: Path):
    """Values of the chart, the status, and lists of shards or tenants."""
    status = fields(ROOT / "crds" / "lmcacheclusters.lmcache.io.yaml")
    for place, fence in FENCES.items():
        for content in contents(fence):
            if whole(content) or content.get("kind") in FOREIGN_KINDS:
                continue
            if content.keys() <= VALUES:
                values = tmp_path / "values.yaml"
                values.write_text(fence.text)
                plane.helm("template", "release", CHART, "--values", values)
            elif not (content.keys() <= SHARDS or content.keys() <= TENANTS):
                assert {f"status.{path}" for path in paths(content)} <= set(status), place


def paths(value: Any, prefix: str = "") -> Iterator[str]:
    """Paths of all fields in nested mappings and lists."""
    if isinstance(value, list):
        for entry in value:
            yield from paths(entry, prefix)
    elif isinstance(value, dict):
        for name, entry in value.items():
            path = f"{prefix}.{name}" if prefix else name
            yield path
            yield from paths(entry, path)
