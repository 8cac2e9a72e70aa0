"""Samples of requests that a real sidecar serves over HTTP."""

import json
import urllib.error
from collections.abc import Sequence

import numpy as np
import pytest

from lmcache_client.rpc.hello import Role
from lmcache_client.rpc.session import SidecarSession
from lmcache_store.curves import HASHES, Lookup, MissRatioCurve
from lmcache_store.tiers.memory.contracts import Reserved
from testing.processes import SidecarProcess
from testing.workloads.requests import chat
from tests.harness.engine import report, session_of
from tests.harness.sidecar.samples import Watch, requests_of
from tests.harness.sidecar.wire import attached, make_keys

CHUNK_BYTES = 4096


def test_only_scheduled_requests_are_sampled_and_only_once(sidecar, scheduler):
    watch = Watch(sidecar)
    for _ in range(3):
        scheduler.lookup("r", [(0, make_keys(1, 2, 3))], hint=True)
        scheduler.lookup("r", [(0, make_keys(1, 2))])
    report(scheduler, "r", 1, 2, 3, num_engine_chunks=1, num_hit_chunks=2, num_loaded_tokens=256)
    (request,) = watch.next(1)
    names = [int.from_bytes(make_keys(number)[-8:], "big") for number in (3, 2, 1)]
    assert (request.keys, request.tiers) == (names, "-me")
    lookups = sidecar.stats()["lookups"]
    assert (lookups["num_lookups"], lookups["lookup_tokens"]) == (1, 3 * 256)
    assert lookups["hit_tokens"] == {"engine": 256, "memory": 256}
    assert 'lmcache_hit_tokens_total{tier="engine"} 256.0' in sidecar.get("/metrics")
    assert "lmcache_lookup_tokens_total 768.0" in sidecar.get("/metrics")


def test_restarted_sidecar_starts_a_new_ring(sidecar, connect):
    client = connect(Role.SCHEDULER)
    old_session = attached(client)
    report(old_session, "r", 1, 2)
    first_answer = json.loads(sidecar.get("/samples"))
    sidecar.restart()
    scheduler = attached(client, newer_than=old_session)
    for request in range(5):
        report(scheduler, str(request), 7, 8)
    second_answer = json.loads(sidecar.get(f"/samples?since={first_answer['next']}"))
    assert second_answer["started"] > first_answer["started"]
    assert len(json.loads(sidecar.get("/samples"))["num"]) == 5


def test_samples_are_unavailable_until_the_sidecar_is_ready():
    with SidecarProcess(memory_size="900Ti", stay_up="true") as sidecar:
        with pytest.raises(urllib.error.HTTPError) as refused:
            sidecar.get("/samples")
        assert refused.value.code == 503
        assert refused.value.read()


def test_curve_of_the_samples_predicts_the_hits_of_the_sidecar():
    with (
        SidecarProcess(memory_size="8Mi") as sidecar,
        session_of(sidecar, chunk_bytes=CHUNK_BYTES) as worker,
        session_of(sidecar, role=Role.SCHEDULER, chunk_bytes=CHUNK_BYTES) as scheduler,
    ):
        curve, since = None, 0
        for number, request in enumerate(chat(1, 0.2, scale=1, systems=3, first=3).requests[:1500]):
            serve(scheduler, worker, f"r{number}", request.keys)
            if number % 500 == 499:
                answer = json.loads(sidecar.get(f"/samples?since={since}"))
                assert not answer["dropped"]
                since = answer["next"]
                rate, row_bytes = answer["below"] / HASHES, answer["row_bytes"]
                curve = curve or MissRatioCurve(100_000, rate=rate, largest_bytes=2.0**30)
                curve.feed(Lookup(request.time, request.keys, row_bytes) for request in requests_of(answer))
        stats = sidecar.stats()
    lookups = stats["lookups"]
    assert 0.3 < rate < 0.9, "the test needs sampling"
    curve.count_accesses(lookups["lookup_tokens"] // 256)
    measured = sum(lookups["hit_tokens"].values()) / lookups["lookup_tokens"]
    size = stats["memory"]["usable_bytes"]
    assert curve.hit_ratio(size).hit_ratio == pytest.approx(measured, abs=0.005)
    between = curve.windows[0].between
    assert min(between(size / 2, size).share, between(size, 4 * size).share) > 0.01, "the curve is flat"


def serve(scheduler: SidecarSession, worker: SidecarSession, request: str, chunks: Sequence[int]) -> None:
    """Report the request with its hits, and store the missing chunks."""
    keys = make_keys(*chunks)
    num_hits = len(scheduler.index.find(np.frombuffer(keys, "<u8").reshape(-1, 8)).rows)
    report(scheduler, request, *chunks, num_hit_chunks=num_hits, num_loaded_tokens=256 * num_hits)
    missing = keys[64 * num_hits :]
    reserved = worker.reserve(0, missing, request_id=request, first_chunk=num_hits) if missing else []
    worker.commit([reservation.slot for reservation in reserved if reservation.result is Reserved.SLOT])
