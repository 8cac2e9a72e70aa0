"""Workloads replayed on a real sidecar hit like an exact simulation of its memory tier."""

import time

import pytest

from testing.child_process import wait_until
from testing.processes import SidecarProcess
from testing.workloads.clock import Clock
from testing.workloads.replay import Replay
from testing.workloads.requests import TOKENS, chat
from testing.workloads.tiers import Service

ROW_BYTES = 256 << 10


def settle(sidecar: SidecarProcess) -> None:
    """Wait until all stored rows are checksummed and written. Rows are not evicted before."""
    sidecar.wait_until(lambda stats: not stats["num_unwritten_rows"])


def test_sidecar_hits_equal_those_of_an_exact_tier():
    workload = chat(0.3, 0.1, scale=1, systems=3, first=3)
    with (
        SidecarProcess(memory_size="64Mi") as sidecar,
        Replay(workload, ROW_BYTES, Clock(time.time(), 1e9), before=lambda: settle(sidecar)) as replay,
    ):
        replay.start([sidecar])
        wait_until(lambda: replay.is_over, timeout=240)
        stats = sidecar.stats()
    exact = Service(1, 0, stats["memory"]["capacity_rows"])
    hits = [exact.serve(0, request.keys) for request in workload.requests]
    assert [served.num_rows for served in replay.served] == list(map(sum, hits))
    num_rows, num_hits = sum(map(sum, hits)), sum(hit.memory for hit in hits)
    assert 0.2 < num_hits / num_rows < 0.8
    assert stats["memory"]["removed"]["evicted"] > stats["memory"]["capacity_rows"]
    num_sidecar_hits = sum(served.num_hits for served in replay.served)
    assert num_sidecar_hits / num_rows == pytest.approx(num_hits / num_rows, abs=0.005)
    # The statistics that size the tier agree.
    assert stats["lookups"]["num_lookups"] == len(workload.requests)
    assert stats["lookups"]["lookup_tokens"] == num_rows * TOKENS
    assert stats["lookups"]["hit_tokens"]["memory"] == num_sidecar_hits * TOKENS
