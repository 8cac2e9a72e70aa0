"""The examples on a real API server: it admits them, and the operator applies each and becomes idle."""

from pathlib import Path

import pytest
import yaml

from testing.kube.api import Object
from testing.kube.cluster import Cluster
from tests.harness.kube import CLUSTERS, EXAMPLE, NAME, Operator
from tests.harness.operator.clusters import wait_quiet

pytestmark = pytest.mark.kube
FILES = sorted(EXAMPLE.parent.rglob("*.yaml"))
_MISSING_KINDS = {"PodMonitor"}
"""Kinds that this API server does not serve."""


def documents(file: Path, *kinds: str) -> list[Object]:
    objects = [obj for obj in yaml.safe_load_all(file.read_text()) if obj["kind"] not in _MISSING_KINDS]
    return [obj for obj in objects if not kinds or obj["kind"] in kinds]


def test_api_server_admits_all_examples_unchanged(plane: Cluster, namespace):
    objects = [document for file in FILES for document in documents(file)]
    names = [(document["kind"], document["metadata"]["name"]) for document in objects]
    assert len(set(names)) == len(names) > len(FILES)
    arguments = ("--dry-run=server", "--validate=strict", "--namespace", namespace, "--filename", "-")
    plane.kubectl("apply", *arguments, stdin=yaml.safe_dump_all(objects))


@pytest.mark.parametrize("file", [f for f in FILES if documents(f, "LMCacheCluster")], ids=lambda f: f.stem)
def test_operator_applies_each_example_once(plane: Cluster, operator: Operator, namespace, file):
    (cluster,) = documents(file, "LMCacheCluster")
    cluster["metadata"]["name"] = NAME
    plane.api.create(CLUSTERS, cluster, namespace)
    engine = cluster["spec"].get("engine")
    part = "remote" if engine is None else "engine-0" if engine.get("nodes", 1) > 1 else "engine"
    plane.wait(lambda: plane.api.find("apps/v1/statefulsets", f"{NAME}-{part}", namespace))
    wait_quiet(plane, operator, namespace)
    conditions = plane.wait(
        lambda: plane.api.get(CLUSTERS, NAME, namespace).get("status", {}).get("conditions")
    )
    assert not {"InvalidSpec", "Refused"} & {condition["reason"] for condition in conditions}
