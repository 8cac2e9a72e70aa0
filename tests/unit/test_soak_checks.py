"""Checks at the end of a soak run: each finds its fault, and accepts a right run."""

import contextlib
import copy
import json
import random
import threading
import tracemalloc
from collections import Counter
from typing import Any

import pytest

from lmcache_store.curves.samples import Sampler
from lmcache_store.tiers.memory.contracts import Slot
from testing.soak import checks, rows
from testing.soak.client import Traffic, WrongBytesError
from testing.soak.memory import MEBIBYTE, RING_REQUEST_BYTES, Trend, trend, without_ring
from testing.soak.pages import InvalidPageError, Reader

pytestmark = pytest.mark.rotating("file")

HITS = {"memory": 256, "disk": 256, "remote": 256}
IDLE = {
    "num_clients": {"attached": 0, "quarantined": 0},
    "num_previous_clients": 0,
    "num_unwritten_rows": 0,
    "memory": {"leased_rows": 0, "quarantined_slots": 0},
    "transfer": {"num_slots_under_way": 0},
    "disk": {"num_queued_loads": 0},
    "remote": {"num_queued_loads": 0},
}


TENANTS = {
    "causes": {"prompt_tokens": 30, "cause_tokens": {"memory": 20, "new": 10}},
    "tenants": {
        "tenants_problem": "",
        "tenants_digest": "ab",
        "prompt_tokens": {"search": 10, "batch": 15, "default": 5},
        "hit_tokens": {"search": 10, "batch": 7, "default": 3},
    },
}
LOG = "INFO: Started\nERROR: Lookup failed\nTraceback (most recent call last):\n  x\nKeyError\n"
FAULTS = {"resize": 60, "kill_redis": 70, "kill_sidecar": 59, "rotate_both": 9, "rotate_keys": 60}


def encrypted(problem: str, version: int = 3) -> dict[str, object]:
    tier = {"encryption": {"write_version": version, "versions": [version]}, "encryption_problem": problem}
    return {"disk": tier, "remote": copy.deepcopy(tier)}


def with_tenants(**fields: object) -> dict[str, object]:
    return TENANTS | {"tenants": TENANTS["tenants"] | fields}


def with_idle(path: str, number: int) -> dict[str, object]:
    """Statistics of an idle sidecar that still holds something."""
    stats = copy.deepcopy(IDLE)
    part: Any = stats
    *parents, field = path.split("/")
    for parent in parents:
        part = part[parent]
    part[field] = number
    return stats


@pytest.mark.parametrize(
    ("check", "right", "wrong", "violations"),
    [
        (checks.of_counts, ({"looked_up": 100, "loaded": 20}, HITS),
         ({"looked_up": 100, "loaded": 50, "wrong": 1}, HITS), ["1 clients loaded wrong bytes"]),
        (checks.of_counts, ({"looked_up": 100, "loaded": 20}, HITS),
         ({"looked_up": 100, "loaded": 19}, HITS), ["19 of 100 looked-up rows were loaded"]),
        (checks.of_counts, ({"looked_up": 100, "loaded": 20}, HITS), ({}, HITS), ["0 of 0 looked-up rows"]),
        (checks.of_counts, ({"looked_up": 100, "loaded": 20}, HITS),
         ({"looked_up": 100, "loaded": 50}, HITS | {"disk": 0}), ["no load hit in the disk tier"]),
        (checks.of_keys, (encrypted(""), 3), (encrypted("", 2), 3),
         [f"the {tier} tier encrypts with key 2 instead of 3: no problem" for tier in ("disk", "remote")]),
        (checks.of_keys, (encrypted(""), 3), (encrypted("two files"), 3),
         [f"the {tier} tier encrypts with key 3 instead of 3: two files" for tier in ("disk", "remote")]),
        (checks.of_tenants, (TENANTS, "ab"), (with_tenants(tenants_problem="bad"), "cd"),
         ["the sidecar does not use all budgets of tenants: bad",
          "the sidecar does not use the newest tenants file"]),
        (checks.of_tenants, (TENANTS, "ab"), (with_tenants(hit_tokens={"search": 21}), "ab"),
         ["hit_tokens of 20 tokens by tenant: {'search': 21}"]),
        (checks.of_tenant_hits, ({"search": 1, "batch": 1, "default": 1},), ({"search": 1, "default": 0},),
         ["the tenant batch has no hits", "the tenant default has no hits"]),
        (checks.of_overlap, (FAULTS, {"resize": 1, "kill_redis": 1}), (FAULTS, {"resize": 1}),
         ["70 times kill_redis, but never while keys and password rotated together"]),
        (checks.of_overlap, (FAULTS, {"resize": 1, "kill_redis": 1}), ({}, {}),
         ["keys and password never rotated together"]),
        *((checks.of_idle_stats, (IDLE,), (with_idle(path, 2),), [f"the sidecar still has 2 {name}"])
          for path, name in {
              "num_clients/quarantined": "clients", "num_previous_clients": "clients of earlier sidecars",
              "num_unwritten_rows": "unwritten rows", "memory/leased_rows": "leased rows",
              "memory/quarantined_slots": "slots in quarantine",
              "transfer/num_slots_under_way": "slots under way", "remote/num_queued_loads": "queued loads",
          }.items()),
        (checks.of_log, (LOG[:14],), (LOG,), ["names 1 bugs"]),
        (checks.of_memory, (Trend(100, 3.2, 900),), (Trend(100, 3.3, 900),), [""]),
    ],
)  # fmt: skip
def test_wrong_result_of_a_run_is_a_violation(check, right, wrong, violations):
    assert not list(check(*right))
    texts = list(check(*wrong))
    assert len(texts) == len(violations)
    assert all(expected in text for expected, text in zip(violations, texts, strict=True)), texts


PAGES = {
    "/stats": json.dumps(TENANTS | {"lookups": {"samples_dropped": 0}}),
    "/metrics": "# TYPE a_total counter\na_total 2.0\n",
    "/samples": json.dumps(
        {"version": 1, "now": 9.0, "started": 1.0, "t0": 5.0, "since": 0, "next": 3, "dropped": 0}
        | {"below": 1 << 64, "row_bytes": 1, "chunk_tokens": 1, "namespace": "ab"}
        | {"ms": [0, 1], "num": [2, 1], "key": "0" * 48, "tier": "mm-"}
    ),
    "/requests": json.dumps({"requests": [{"tenant": "batch", "tokens": {"memory": 5}}]}),
}


def get(pages):
    return lambda path: pages[path.partition("?")[0]]


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("/stats", json.dumps(TENANTS | {"causes": {"prompt_tokens": 31, "cause_tokens": {"new": 30}}})),
        ("/stats", "{}"),
        ("/stats", json.dumps({"not_ready_reason": "starting: opening the disk tier takes long"})),
        ("/metrics", ""),
        ("/metrics", "# TYPE a_total counter\na_total 1.0\n"),
        ("/samples", PAGES["/samples"].replace('"num": [2, 1]', '"num": [2, 2]')),
        ("/requests", PAGES["/requests"].replace("batch", "unknown")),
        ("/requests", PAGES["/requests"].replace("memory", "unknown")),
        ("/requests", "not JSON"),
    ],
)
def test_invalid_pages_are_violations(page, text):
    reader = Reader()
    reader.read(1, get(PAGES))
    with pytest.raises(InvalidPageError, match=f"the page {page} is invalid"):
        reader.read(1, get(PAGES | {page: text}))


def test_leaked_descriptors_and_threads_are_violations():
    idle = checks.Held(Counter({"socket:": 5}), 10)
    assert not list(checks.of_resources(idle, checks.Held(Counter({"socket:": 17}), 34)))
    end = checks.Held(Counter({"socket:": 16, "/run/clients/ab.lock": 1, "/run/arena (deleted)": 1}), 35)
    assert len(list(checks.of_resources(idle, end))) == 3


def test_leftover_files_are_violations(tmp_path):
    folder, disk = tmp_path / "socket", tmp_path / "disk"
    (folder / "clients").mkdir(parents=True)
    disk.mkdir()
    (folder / "arena").touch()
    (disk / "row.0").write_bytes(bytes(4096))
    assert not list(checks.of_files(folder, disk, 4096, ""))
    (folder / "clients" / "cd.lock").touch()  # of a client that was killed before it attached
    log = "INFO: Client ab attached, epoch 1"
    assert not list(checks.of_files(folder, disk, 4096, log))
    (folder / "clients" / "ab.lock").touch()
    (folder / "arena.new").touch()
    (disk / "row.0.1.tmp").touch()
    violations = list(checks.of_files(folder, disk, 0, log))
    assert [text.partition(" ")[0] for text in violations] == ["unexpected", "lock", "unfinished", "the"]


def test_trend_is_that_of_the_last_half():
    steep, flat = [(t, (100 + t) * MEBIBYTE) for t in range(10)], [(t, 110 * MEBIBYTE) for t in range(10, 21)]
    line = trend(steep + flat)
    assert line.growth_mebibytes == pytest.approx(0, abs=1e-6)
    assert line.mebibytes == pytest.approx(110)
    assert trend([(t, t * MEBIBYTE) for t in range(21)]).growth_mebibytes == pytest.approx(10)
    with pytest.raises(ValueError, match="too few"):
        trend(flat[:3])


REQUESTS_PER_SECOND = 49
"""Rate in a run of an hour."""


def memory_of_an_hour(leaked_bytes_per_request: int) -> list[tuple[float, int]]:
    """Return samples of the last half of an hour: the ring of samples fills, and something may leak."""
    sampler, samples = Sampler(kept_seconds=480.0), []
    for number in range(1800 * REQUESTS_PER_SECOND):
        seconds = number / REQUESTS_PER_SECOND
        sampler.record(seconds, SAMPLED_KEYS[number % 64], b"m" * rows.NUM_CHUNKS)
        if number % (30 * REQUESTS_PER_SECOND) == 0:
            in_ring = len(sampler.since(0)[1])
            private = 50 * MEBIBYTE + in_ring * 388 + number * leaked_bytes_per_request
            samples.append((seconds, without_ring(private, in_ring)))
    return samples


SAMPLED_KEYS = [random.Random(number).randbytes(8 * rows.NUM_CHUNKS) for number in range(64)]


def test_leak_of_200_bytes_per_request_is_a_violation_after_an_hour_and_a_ring_that_fills_is_none():
    assert not list(checks.of_memory(trend(memory_of_an_hour(0))))
    assert list(checks.of_memory(trend(memory_of_an_hour(200))))


def test_ring_takes_no_more_memory_per_request_than_the_check_subtracts():
    sampler = Sampler(rate=0.25)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(16_000):
            keys = random.Random(number).randbytes(8 * rows.NUM_CHUNKS)
            sampler.record(number + 0.5, keys, b"m" * rows.NUM_CHUNKS)
        per_request = (tracemalloc.get_traced_memory()[0] - before) / len(sampler.since(0)[1])
    finally:
        tracemalloc.stop()
    assert 200 < per_request < RING_REQUEST_BYTES


class WorkerDouble:
    """A worker whose arena has the contents of prompt 3."""

    def __init__(self) -> None:
        self.bytes = [rows.content(3, chunk) for chunk in range(2)]
        self.reused: set[int] = set()

    copying = staticmethod(contextlib.nullcontext)

    def view(self, row, num_bytes):
        return self.bytes[row]

    def holds(self, slot):
        return slot.row not in self.reused


@pytest.fixture
def traffic():
    return Traffic("/nonexistent/kvcache.sock", 1, threading.Event())


def test_client_compares_every_byte(traffic):
    worker, slots = WorkerDouble(), [Slot(0, 1), Slot(1, 1)]
    traffic._load(worker, 3, slots)
    assert traffic.counts["loaded"] == 2
    worker.bytes[1][-1] ^= 1
    with pytest.raises(WrongBytesError, match="prompt 3, chunk 1"):
        traffic._load(worker, 3, slots)
    worker.reused = {1}  # the sidecar reused the slot during the copy, so its bytes count for nothing
    traffic._load(worker, 3, slots)
    assert traffic.counts["reused"] == 1
