"""Random specs on the real API server: each is refused by its field, or comes to rest within few writes.

``NUM_SPECS=2000 python -m pytest tests/integration/test_operator_fuzz.py`` takes them all.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from testing.kube.api import ApiError, Object
from testing.kube.cluster import Cluster, Write
from tests.harness.kube import CLUSTERS, Operator, is_since
from tests.harness.spec_fuzz import spec

pytestmark = pytest.mark.kube

NUM_SPECS = int(os.environ.get("NUM_SPECS", "200"))
MAX_WRITES = 15
"""Of one spec, beyond the one that makes each of its children."""
FIELD = re.compile(r"\bspec\b")
SECONDS = 300 + NUM_SPECS
"""On an idle machine a tenth of it."""


def name_of(seed: int) -> str:
    return f"f{seed:04}"


def create(plane: Cluster, namespace: str, seed: int) -> str:
    """Why the API server refuses the spec, in its words; empty if it takes it."""
    header = {"apiVersion": "lmcache.io/v1alpha1", "kind": "LMCacheCluster"}
    try:
        made = header | {"metadata": {"name": name_of(seed)}, "spec": spec(seed)[0]}
        plane.api.create(CLUSTERS, made, namespace)
    except ApiError as error:
        return str(error)
    return ""


def conditions(cluster: Object) -> dict[str, Object]:
    status = cluster.get("status", {})
    is_seen = status.get("observedGeneration") == cluster["metadata"]["generation"]
    return {c["type"]: c for c in status.get("conditions", [])} if is_seen else {}


def writes(plane: Cluster, operator: Operator, mark: int, namespace: str) -> list[Write]:
    """What was done; Events are no part of it."""
    found = plane.written_since(mark, by=operator.user, namespace=namespace)
    return [write for write in found if write.code < 300 and write.resource != "events"]


def test_random_specs_are_refused_by_their_field_or_come_to_rest(plane, operator, namespace):
    log_mark, mark = len(operator.log), plane.mark()
    with ThreadPoolExecutor(2) as pool:
        refused = list(pool.map(lambda seed: create(plane, namespace, seed), range(NUM_SPECS)))
    for seed, message in enumerate(refused):
        is_explained = message.startswith(("400", "422")) and FIELD.search(message)
        assert not message or is_explained, f"seed {seed}: {message}"
    num_taken = refused.count("")
    assert NUM_SPECS / 5 < num_taken < NUM_SPECS, refused

    def all_seen() -> list[Object] | None:
        found = plane.api.objects(CLUSTERS, namespace)
        return found if all(map(conditions, found)) and len(found) == num_taken else None

    taken = plane.wait(all_seen, SECONDS)

    def is_quiet() -> bool:
        """Nothing is written while the operator finds the time for one that was changed."""
        num_writes, num_runs = len(writes(plane, operator, mark, namespace)), operator.num_reconciliations()
        note = {"metadata": {"annotations": {"test/poke": str(num_runs)}}}
        plane.api.patch(CLUSTERS, taken[0]["metadata"]["name"], note, namespace)
        plane.wait(lambda: operator.num_reconciliations() > num_runs, SECONDS)
        return len(writes(plane, operator, mark, namespace)) == num_writes

    plane.wait(lambda: all(is_quiet() for _ in range(5)), SECONDS)
    made = writes(plane, operator, mark, namespace)
    children = {(w.resource, w.name) for w in made if not w.resource.endswith("/status")}
    num_made = Counter(name.partition("-")[0] for _, name in children)
    num_written = Counter(write.name.partition("-")[0] for write in made)
    for cluster in taken:
        name, degraded = cluster["metadata"]["name"], conditions(cluster)["Degraded"]
        assert num_written[name] - num_made[name] <= MAX_WRITES, f"{name}: {degraded}"
        is_too_new = "does not know this kind" in degraded["message"] and not is_since("1.34")
        if degraded["reason"] in ("InvalidSpec", "Refused") and not is_too_new:
            assert FIELD.search(degraded["message"]), f"{name}: {degraded['message']}"
    assert "Traceback" not in operator.log[log_mark:]
    assert operator.is_running
