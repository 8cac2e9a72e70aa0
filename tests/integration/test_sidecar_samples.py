"""What a real sidecar tells of requests, by HTTP."""

from __future__ import annotations

import json
import random
import urllib.error
from collections.abc import Iterator

import numpy as np
import pytest

from lmcache.curves import HASHES, Lookup, MissRatioCurve
from lmcache.rpc.client import Role, Scheduled, Session
from lmcache.tiers.memory.contracts import Reserved
from testing.processes import SidecarProcess
from tests.harness.engine import session_of
from tests.harness.samples import Watch, requests_of
from tests.harness.wire import attached, make_keys

CHUNK_BYTES = 4096


def go_on(scheduler: Session, request: str, *numbers: int, **found: int) -> None:
    """As the engine's scheduler tells of a request that loads nothing."""
    keys = [(0, make_keys(*numbers))]
    scheduler.lookup(request, keys, hint=True, scheduled=Scheduled(**found))


def test_asking_is_not_told_and_going_on_is_once(sidecar, connect):
    scheduler = attached(connect(Role.SCHEDULER))
    told = Watch(sidecar)
    for _ in range(3):
        scheduler.lookup("r", [(0, make_keys(1, 2, 3))], hint=True)
        scheduler.lookup("r", [(0, make_keys(1, 2))])
    go_on(scheduler, "r", 1, 2, 3, num_engine_chunks=1, num_hit_chunks=2, num_loaded_tokens=256)
    (request,) = told.next(1)
    names = [int.from_bytes(make_keys(number)[-8:], "big") for number in (3, 2, 1)]
    assert (request.keys, request.tiers) == (names, "-me")
    lookups = sidecar.stats()["lookups"]
    assert (lookups["num_lookups"], lookups["lookup_tokens"]) == (1, 3 * 256)
    assert lookups["hit_tokens"] == {"engine": 256, "memory": 256}
    assert 'lmcache_hit_tokens_total{tier="engine"} 256.0' in sidecar.get("/metrics")
    assert "lmcache_lookup_tokens_total 768.0" in sidecar.get("/metrics")


def test_who_asks_badly_is_told_why_and_others_are_answered(sidecar, connect):
    go_on(attached(connect(Role.SCHEDULER)), "r", 1)
    for query, sentence in (
        ("since=-1", "since must be a number from 0 to"),
        ("below=0", "below must be a number from 1 to"),
        ("since=0&limit=1", "'limit' is no parameter"),
        ("since=" + "9" * 4000, "since must be"),
        ("%00=%ff%fe", "is no parameter"),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            sidecar.get(f"/samples?{query}")
        assert refused.value.code == 400
        assert sentence in refused.value.read().decode()
    assert json.loads(sidecar.get("/samples?since=18446744073709551616&below=1"))["num"] == []
    assert json.loads(sidecar.get("/samples?since=0&below=18446744073709551616"))["num"] == [1]
    assert sidecar.get("/healthz?x=1&y") == "ok\n"


def test_after_a_restart_the_ring_is_another(sidecar, connect):
    client = connect(Role.SCHEDULER)
    before = attached(client)
    go_on(before, "r", 1, 2)
    last = json.loads(sidecar.get("/samples"))
    sidecar.restart()
    scheduler = attached(client, newer_than=before)
    for request in range(5):
        go_on(scheduler, str(request), 7, 8)
    later = json.loads(sidecar.get(f"/samples?since={last['next']}"))
    assert later["started"] > last["started"]
    assert len(json.loads(sidecar.get("/samples"))["num"]) == 5


def test_a_sidecar_that_is_not_there_yet_says_so():
    with SidecarProcess(memory_size="900Ti", stay_up="true") as sidecar:
        with pytest.raises(urllib.error.HTTPError) as refused:
            sidecar.get("/samples")
        assert refused.value.code == 503
        assert refused.value.read()


def sessions(seed: int, number: int) -> Iterator[list[int]]:
    """Requests of sessions that grow by every turn; some end, and of those some begin anew with a shared
    start."""
    generator = random.Random(seed)
    live = [[1_000_000 * (1 + at)] for at in range(60)]
    for _ in range(number):
        at = min(int(generator.paretovariate(0.6)) - 1, len(live) - 1)
        chain = live[at]
        chain += range(chain[-1] + 1, chain[-1] + 1 + generator.randrange(1, 6))
        yield list(chain)
        if len(chain) > 60 or generator.random() < 0.03:
            shared = chain[: generator.choice((0, 0, 8))]
            live[at] = [*shared, generator.randrange(10**8, 10**12) * 100]
        if generator.random() < 0.02:
            generator.shuffle(live)


def test_the_curve_of_what_is_told_is_what_the_sidecar_hits():
    with (
        SidecarProcess(memory_size="12Mi") as sidecar,
        session_of(sidecar, chunk_bytes=CHUNK_BYTES) as worker,
        session_of(sidecar, role=Role.SCHEDULER, chunk_bytes=CHUNK_BYTES) as scheduler,
    ):
        curve, since = None, 0
        for number, chunks in enumerate(sessions(1, 3000)):
            serve(scheduler, worker, f"r{number}", chunks)
            if number % 500 == 499:
                answer = json.loads(sidecar.get(f"/samples?since={since}"))
                assert not answer["dropped"]
                since = answer["next"]
                rate, row_bytes = answer["below"] / HASHES, answer["row_bytes"]
                curve = curve or MissRatioCurve(100_000, rate=rate, largest_bytes=2.0**30)
                curve.feed(Lookup(one.time, one.keys, row_bytes) for one in requests_of(answer))
        stats = sidecar.stats()
    lookups = stats["lookups"]
    assert 0.3 < rate < 0.9, "some are sampled"
    curve.count_accesses(lookups["lookup_tokens"] // 256)
    measured = sum(lookups["hit_tokens"].values()) / lookups["lookup_tokens"]
    size = stats["memory"]["usable_bytes"]
    assert curve.hit_ratio(size).hit_ratio == pytest.approx(measured, abs=0.005)
    between = curve.windows[0].between
    assert min(between(size / 2, size).share, between(size, 4 * size).share) > 0.01, "or any size would do"


def serve(scheduler: Session, worker: Session, request: str, chunks: list[int]) -> None:
    """Count what is in memory, store the rest."""
    keys = make_keys(*chunks)
    found = len(scheduler.index.find(np.frombuffer(keys, "<u8").reshape(-1, 8)).rows)
    go_on(scheduler, request, *chunks, num_hit_chunks=found, num_loaded_tokens=256 * found)
    missing = keys[64 * found :]
    reserved = worker.reserve(0, missing, request_id=request, first_chunk=found) if missing else []
    worker.commit([one.slot for one in reserved if one.result is Reserved.SLOT])
