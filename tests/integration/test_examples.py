"""The examples on a real API server: admitted as they are, carried out, and at rest afterwards."""

from itertools import chain
from pathlib import Path

import pytest
import yaml
from lmcache_operator.api.crd import dump
from lmcache_operator.api.parse import parse
from lmcache_operator.components import COMPONENTS
from lmcache_operator.components.base import Context
from lmcache_operator.specs.names import STOCK_IMAGES

from testing.kube.api import Object
from testing.kube.cluster import Cluster
from tests.harness.clusters import wait_quiet
from tests.harness.kube import CLUSTERS, EXAMPLE, NAME, Operator
from tools.kube import schemas

pytestmark = pytest.mark.kube
FILES = sorted(EXAMPLE.parent.rglob("*.yaml"))
_OF_OTHERS = {"PodMonitor"}
"""Kinds that this API server does not have."""


def documents(file: Path, *kinds: str) -> list[Object]:
    found = [found for found in yaml.safe_load_all(file.read_text()) if found["kind"] not in _OF_OTHERS]
    return [document for document in found if not kinds or document["kind"] in kinds]


def test_all_are_admitted_as_they_are_written(plane: Cluster, namespace):
    objects = [document for file in FILES for document in documents(file)]
    names = [(document["kind"], document["metadata"]["name"]) for document in objects]
    assert len(set(names)) == len(names) > len(FILES)
    arguments = ("--dry-run=server", "--validate=strict", "--namespace", namespace, "--filename", "-")
    plane.kubectl("apply", *arguments, stdin=yaml.safe_dump_all(objects))


def test_what_becomes_of_them_fits_the_schemas():
    clusters = [parse(document) for file in FILES for document in documents(file, "LMCacheCluster")]
    rendered = [own.render(cluster, Context(STOCK_IMAGES)) for cluster in clusters for own in COMPONENTS]
    # What other people's pods are given has the form of a pod's template, in a kind of ours.
    as_pods = {"LMCacheProfile": {"apiVersion": "v1", "kind": "PodTemplate"}}
    children = [child | as_pods.get(child["kind"], {}) for child in chain.from_iterable(rendered)]
    assert schemas.validate(dump(children)) == []


@pytest.mark.parametrize("file", [f for f in FILES if documents(f, "LMCacheCluster")], ids=lambda f: f.stem)
def test_each_is_carried_out_once(plane: Cluster, operator: Operator, namespace, file):
    (cluster,) = documents(file, "LMCacheCluster")
    cluster["metadata"]["name"] = NAME
    plane.api.create(CLUSTERS, cluster, namespace)
    part = "engine" if "engine" in cluster["spec"] else "remote"
    plane.wait(lambda: plane.api.find("apps/v1/statefulsets", f"{NAME}-{part}", namespace))
    wait_quiet(plane, operator, namespace)
    conditions = plane.wait(
        lambda: plane.api.get(CLUSTERS, NAME, namespace).get("status", {}).get("conditions")
    )
    assert not {"InvalidSpec", "Refused"} & {condition["reason"] for condition in conditions}
