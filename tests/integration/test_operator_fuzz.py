"""Random specs on a real API server. Each is refused by the name of its field, or settles in few writes."""

import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from testing.kube.api import ApiError, Object
from testing.kube.audit import Request
from testing.kube.cluster import Cluster
from tests.harness.kube import CLUSTERS, Operator, is_since
from tests.harness.operator.clusters import written
from tests.harness.operator.settled_specs import check_condition
from tests.harness.operator.spec_fuzz import seeds, spec

pytestmark = pytest.mark.kube

NUM_AT_ONCE = 40
"""Specs that the operator has at the same time. Of hundreds, most would wait for it."""
SEEDS = seeds(3 * NUM_AT_ONCE)
BATCHES = [SEEDS[first : first + NUM_AT_ONCE] for first in range(0, len(SEEDS), NUM_AT_ONCE)]
MAX_WRITES = 15
"""Writes allowed for each spec, in addition to the first write of each child."""
FIELD = re.compile(r"\bspec\b")
SECONDS = 300.0
"""Time for all specs to settle. An idle machine needs a tenth of it."""


def cluster_of(name: str) -> str:
    """Name of the cluster to which an object belongs. Prefill pods have a cluster of their own."""
    first, _, rest = name.partition("-")
    return f"{first}-prefill" if rest.startswith("prefill") else first


def create(plane: Cluster, namespace: str, seed: int) -> str:
    """The API server's reason to refuse the spec, or an empty string if it accepts the spec."""
    header = {"apiVersion": "lmcache.io/v1alpha1", "kind": "LMCacheCluster"}
    try:
        resource = header | {"metadata": {"name": f"f{seed}"}, "spec": spec(seed)[0]}
        plane.api.create(CLUSTERS, resource, namespace)
    except ApiError as error:
        return str(error)
    return ""


def conditions(cluster: Object) -> dict[str, Object]:
    status = cluster.get("status", {})
    is_observed = status.get("observedGeneration") == cluster["metadata"]["generation"]
    return {c["type"]: c for c in status.get("conditions", [])} if is_observed else {}


def writes(plane: Cluster, operator: Operator, mark: int, namespace: str) -> list[Request]:
    """The operator's successful writes, without Events and heartbeats."""
    all_writes = written(plane, operator, mark, namespace)
    return [write for write in all_writes if write.code < 300 and write.resource != "events"]


@pytest.mark.parametrize("numbers", BATCHES, ids=lambda numbers: f"from-{numbers[0]}")
def test_random_specs_are_refused_by_field_or_settle_within_few_writes(plane, operator, namespace, numbers):
    log_mark, mark = len(operator.log), plane.mark()
    with ThreadPoolExecutor(2) as pool:
        refused = list(pool.map(lambda seed: create(plane, namespace, seed), numbers))
    for seed, message in zip(numbers, refused, strict=True):
        is_explained = message.startswith(("400", "422")) and FIELD.search(message)
        assert not message or is_explained, f"seed {seed}: {message}"
    num_accepted = refused.count("")
    assert len(numbers) / 5 < num_accepted < len(numbers), refused

    def all_observed() -> list[Object] | None:
        clusters = plane.api.objects(CLUSTERS, namespace)
        num_declared = sum("-" not in each["metadata"]["name"] for each in clusters)
        return clusters if all(map(conditions, clusters)) and num_declared == num_accepted else None

    accepted = plane.wait(all_observed, SECONDS)

    def is_quiet() -> bool:
        """Whether the operator writes nothing while it reconciles a changed cluster."""
        num_writes, num_runs = len(writes(plane, operator, mark, namespace)), operator.num_reconciliations()
        change = {"metadata": {"annotations": {"test/poke": str(num_runs)}}}
        plane.api.patch(CLUSTERS, accepted[0]["metadata"]["name"], change, namespace)
        plane.wait(lambda: operator.num_reconciliations() > num_runs, SECONDS)
        return len(writes(plane, operator, mark, namespace)) == num_writes

    plane.wait(lambda: all(is_quiet() for _ in range(5)), SECONDS)
    all_writes = writes(plane, operator, mark, namespace)
    children = {(w.resource, w.name) for w in all_writes if not w.resource.endswith("/status")}
    num_children = Counter(cluster_of(name) for _, name in children)
    num_written = Counter(cluster_of(write.name) for write in all_writes)
    for cluster in accepted:
        name, degraded = cluster["metadata"]["name"], conditions(cluster)["Degraded"]
        assert num_written[name] - num_children[name] <= MAX_WRITES, f"{name}: {degraded}"
        is_too_new = "does not know this kind" in degraded["message"] and not is_since("1.34")
        is_not_installed = "it needs cert-manager" in degraded["message"]
        check_condition(degraded, name)
        if degraded["reason"] == "Refused" and not (is_too_new or is_not_installed):
            assert FIELD.search(degraded["message"]), f"{name}: {degraded['message']}"
    assert "Traceback" not in operator.log[log_mark:]
    assert operator.is_running
