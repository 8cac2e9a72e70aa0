"""A workload that is replayed against a real sidecar is to it what it is to an exact tier."""

import time

import pytest

from testing.child_process import wait_until
from testing.processes import SidecarProcess
from testing.workloads.replay import Clock, Replay
from testing.workloads.requests import HOUR, TOKENS, Request, Workload, chat
from testing.workloads.tiers import Service

ROW_BYTES = 256 << 10


def test_the_sidecar_hits_what_an_exact_tier_would():
    workload = chat(0.5, 0.1, scale=1, systems=3, first=3)
    with (
        SidecarProcess(memory_size="64Mi") as sidecar,
        Replay(workload, ROW_BYTES, Clock(time.time(), 1e9)) as replay,
    ):
        replay.start([sidecar])
        wait_until(lambda: replay.is_over, timeout=240)
        stats = sidecar.stats()
    exact = Service(1, 0, stats["memory"]["capacity_rows"])
    hits = [exact.serve(0, request.keys) for request in workload.requests]
    assert [served.num_rows for served in replay.served] == list(map(sum, hits))
    num_rows, num_hits = sum(map(sum, hits)), sum(found.memory for found in hits)
    assert 0.2 < num_hits / num_rows < 0.8
    assert stats["memory"]["removed"]["evicted"] > stats["memory"]["capacity_rows"]
    got = sum(served.num_hits for served in replay.served)
    assert got / num_rows == pytest.approx(num_hits / num_rows, abs=0.005)
    # And so it is told to whoever sizes it.
    assert stats["lookups"]["num_lookups"] == len(workload.requests)
    assert stats["lookups"]["lookup_tokens"] == num_rows * TOKENS
    assert stats["lookups"]["hit_tokens"]["memory"] == got * TOKENS


def test_no_request_is_served_before_its_time():
    workload = Workload([Request(0.1 * HOUR * number, 0, (number,)) for number in range(20)])
    clock = Clock(time.time(), HOUR)  # an hour in a second
    with SidecarProcess(memory_size="64Mi") as sidecar, Replay(workload, ROW_BYTES, clock) as replay:
        began = time.time()
        replay.start([sidecar])
        wait_until(lambda: replay.is_over, timeout=240)
        took = time.time() - began
    assert took >= 1.9
    assert len(replay.served) == 20
    assert clock.at(clock.origin + 2) == pytest.approx(clock.origin + 2 * HOUR)
