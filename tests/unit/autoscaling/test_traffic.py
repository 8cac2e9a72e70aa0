"""Traffic statistics of lookups: compared with exact tiers, over pods, and across a restart."""

import json
import random
from pathlib import Path

import pytest

from lmcache_operator.policy.decide import decide
from lmcache_operator.policy.state import State
from lmcache_operator.policy.tier import GIB
from lmcache_operator.policy.traffic import Traffic
from lmcache_store.curves import MissRatioCurve
from testing.workloads.closed_loop import Routing, Setup, lookups, scattered, sticky
from testing.workloads.requests import Workload, agents, chat, mooncake
from testing.workloads.tiers import Service

TRACES = Path(__file__).parents[3] / "benchmarks" / "traces"


def measured(workload: Workload, route: Routing, num_pods: int, gib: float) -> float:
    """Hit ratio of exact tiers of this size."""
    pods = Service(num_pods, 0, workload.rows(gib * GIB))
    hits = sum(pods.serve(route(request), request.keys).memory for request in workload.requests)
    return hits / sum(len(request.keys) for request in workload.requests)


@pytest.mark.parametrize("gib", [32, 64, 128])
def test_curve_equals_the_hits_of_exact_tiers(gib):
    """This holds even if a request fills a fifth of the tier.

    A curve that counts single accesses is far off there.
    """
    workload, route = agents(3, 0.02), sticky(2)
    batch = [(route(request), request) for request in workload.requests]
    curve, naive = MissRatioCurve(10**6), MissRatioCurve(10**6)
    curve.feed(lookups(workload, batch))
    naive.feed(lookup._replace(keys=[key]) for lookup in lookups(workload, batch) for key in lookup.keys)
    exact = measured(workload, route, 2, gib)
    size = (workload.rows(gib * GIB) + 0.5) * workload.row_bytes
    assert curve.hit_ratio(size).hit_ratio == pytest.approx(exact, abs=0.002)
    assert abs(naive.hit_ratio(size).hit_ratio - exact) > 0.02


@pytest.mark.rotating
def test_scattering_over_sixteen_pods_loses_twenty_percentage_points():
    """The loss is the difference to pods that share their memory, on the conversation trace."""
    workload = mooncake(TRACES / "mooncake_conversation_trace.jsonl.gz")
    for route, loss, error in ((scattered(16), 0.20, 0.01), (sticky(16), 0.0, 0.006)):
        setup = Setup(workload, num_pods=16)
        traffic = Traffic("ns", 16 * GIB, 512 * GIB, max_keys=10**6)
        state = State("ns", started=-3600.0, size=64 * GIB, usable=1.0)
        traffic.memory(0.0, 64 * GIB, setup.service, state)
        batch = [(route(request), request) for request in workload.requests]
        traffic.curve.feed(lookups(workload, batch))
        traffic.count(3600.0, 3600.0, sum(len(request.keys) for request in workload.requests), 0)
        measured = traffic.memory(3600.0, 64 * GIB, setup.service, state)
        assert measured.locality_loss == pytest.approx(loss, abs=error)
        decision, _ = decide(setup.tier, state, measured)
        assert (decision.next, decision.limited_by == "Locality") == (64 * GIB, loss > 0.1)


def test_restart_forgets_only_the_last_hour():
    """The day's curve is saved. The latest accesses are counted again from samples."""
    workload, route = chat(6, 0.2), sticky(2)
    batch = [(route(request), request) for request in workload.requests]
    whole, first = (Traffic("ns", 16 * GIB, 512 * GIB) for _ in range(2))
    half = len(batch) // 2
    whole.curve.feed(lookups(workload, batch))
    first.curve.feed(lookups(workload, batch[:half]))
    text = json.dumps(first.state())
    restarted = Traffic("ns", 16 * GIB, 512 * GIB)
    restarted.restore(json.loads(text))
    restarted.curve.feed(lookups(workload, batch))
    for gib in (16, 64, 256):
        for name in ("windows", "shared_windows"):
            restored, known = (
                getattr(each.curve, name)[0].hit_ratio(gib * GIB) for each in (restarted, whole)
            )
            assert restored == pytest.approx(known, abs=1e-3)
    assert restarted.curve.new_bytes == pytest.approx(whole.curve.new_bytes)
    for invalid_state in ({}, {**json.loads(text), "namespace": "other"}, {**json.loads(text), "days": [1]}):
        with pytest.raises(ValueError, match=r"traffic is invalid|namespace 'other'|window|zip"):
            restarted.restore(invalid_state)


def test_saved_state_is_small_for_any_amount_of_traffic():
    """Keys have all distances, and are in all groups, from 1 GiB to 4 TiB."""
    traffic = Traffic("ns", GIB, 4096 * GIB)
    random_source = random.Random(0)
    for window in traffic._days():
        for number in range(200_000):
            size = GIB * 2 ** random_source.uniform(-1, 13)
            steps = window.steps([int(size)], 1.0, 1)
            window.add(60.0 * number, [random_source.randrange(17)], steps, random_source.random())
    assert len(json.dumps(traffic.state())) <= 64 << 10
