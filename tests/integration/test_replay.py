"""Workloads replayed on a real sidecar hit like an exact simulation of its memory tier."""

import contextlib
import time

import pytest

from testing.child_process import wait_until
from testing.processes import RedisProcess, SidecarProcess
from testing.workloads.clock import Clock
from testing.workloads.replay import Engine, Replay
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


@pytest.mark.redis
def test_rows_stored_by_one_pod_are_promoted_in_another():
    num_rows, keys = 20, [tuple(range(start, start + 20)) for start in range(0, 400, 20)]
    assert len(keys) * num_rows * ROW_BYTES > 64 << 20
    with RedisProcess() as redis, contextlib.ExitStack() as stack:
        # Even on a slow machine no request times out, and nothing is computed instead of loaded.
        processes = [SidecarProcess(remote_url=redis.url, remote_timeout_seconds=60) for _ in range(2)]
        sidecars = [stack.enter_context(process) for process in processes]
        first, second = (
            stack.enter_context(contextlib.closing(Engine(sidecar, bytes(32), ROW_BYTES, 1e-3)))
            for sidecar in sidecars
        )
        for number, request in enumerate(keys):
            assert first.serve(f"first-{number}", request) == (0, 0)
            settle(sidecars[0])
        for number, request in enumerate(keys):
            assert second.serve(f"second-{number}", request) == (0, num_rows)
        assert second.serve("third", keys[-1]) == (num_rows, 0)
        # real time: a sidecar remembers for a second which rows were absent, here before the stores
        time.sleep(1.1)
        assert first.serve("fourth", keys[0]) == (0, num_rows), (
            "the rows were evicted, and are promoted again"
        )
        hits = [sidecar.stats()["lookups"]["hit_tokens"] for sidecar in sidecars]
    assert hits[1] == {"remote": len(keys) * num_rows * TOKENS, "memory": num_rows * TOKENS}
    assert hits[0] == {"remote": num_rows * TOKENS}
