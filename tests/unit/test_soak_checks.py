"""Checks at the end of a soak run: each finds its fault, and accepts a right run."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import Counter

import pytest

from lmcache.tiers.memory.contracts import Slot
from testing.soak import checks, rows
from testing.soak.client import Traffic, WrongBytesError
from testing.soak.memory import MEBIBYTE, Trend, private_bytes, trend

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


def test_right_counts_are_accepted():
    assert not list(checks.of_counts({"looked_up": 100, "loaded": 20}, HITS))


@pytest.mark.parametrize(
    ("counts", "hits", "violation"),
    [
        ({"looked_up": 100, "loaded": 50, "wrong": 1}, HITS, "1 clients loaded wrong bytes"),
        ({"looked_up": 100, "loaded": 19}, HITS, "19 of 100 looked-up rows were loaded"),
        ({}, HITS, "0 of 0 looked-up rows were loaded"),
        ({"looked_up": 100, "loaded": 50}, HITS | {"disk": 0}, "no load hit in the disk tier"),
    ],
)
def test_wrong_counts_are_violations(counts, hits, violation):
    (only,) = checks.of_counts(counts, hits)
    assert violation in only


def encrypted(version: int, problem: str = "") -> dict[str, object]:
    tier = {"encryption": {"write_version": version, "versions": [version]}, "encryption_problem": problem}
    return {"disk": tier, "remote": copy.deepcopy(tier)}


def test_tiers_with_the_newest_key_are_accepted():
    assert not list(checks.of_keys(encrypted(3), 3))


def test_old_keys_and_problems_with_keys_are_violations():
    stats = encrypted(3)
    stats["disk"]["encryption"]["write_version"] = 2
    stats["remote"]["encryption_problem"] = "2 files have one version"
    assert list(checks.of_keys(stats, 3)) == [
        "the disk tier encrypts with key 2 instead of 3: no problem",
        "the remote tier encrypts with key 3 instead of 3: 2 files have one version",
    ]


def test_idle_sidecar_is_accepted():
    assert not list(checks.of_idle_stats(IDLE))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (("num_clients", "quarantined"), "clients"),
        (("num_previous_clients",), "clients of earlier sidecars"),
        (("num_unwritten_rows",), "unwritten rows"),
        (("memory", "leased_rows"), "leased rows"),
        (("memory", "quarantined_slots"), "slots in quarantine"),
        (("transfer", "num_slots_under_way"), "slots under way"),
        (("remote", "num_queued_loads"), "queued loads"),
    ],
)
def test_what_a_sidecar_still_holds_is_a_violation(path, name):
    stats = copy.deepcopy(IDLE)
    *parents, field = path
    part = stats
    for parent in parents:
        part = part[parent]
    part[field] = 2
    assert list(checks.of_idle_stats(stats)) == [f"the sidecar still has 2 {name}"]


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
    assert not list(checks.of_files(folder, disk, 4096))
    (folder / "clients" / "ab.lock").touch()
    (folder / "arena.new").touch()
    (disk / "row.0.1.tmp").touch()
    violations = list(checks.of_files(folder, disk, 0))
    assert [text.partition(" ")[0] for text in violations] == ["unexpected", "lock", "unfinished", "the"]


def test_trend_is_that_of_the_last_half():
    steep, flat = [(t, (100 + t) * MEBIBYTE) for t in range(10)], [(t, 110 * MEBIBYTE) for t in range(10, 21)]
    line = trend(steep + flat)
    assert line.growth_mebibytes == pytest.approx(0, abs=1e-6)
    assert line.mebibytes == pytest.approx(110)
    assert trend([(t, t * MEBIBYTE) for t in range(21)]).growth_mebibytes == pytest.approx(10)
    with pytest.raises(ValueError, match="too few"):
        trend(flat[:3])


def test_growing_memory_is_a_violation():
    assert not list(checks.of_memory(Trend(100, checks.MAX_GROWTH_MEBIBYTES, 1800)))
    assert list(checks.of_memory(Trend(100, checks.MAX_GROWTH_MEBIBYTES + 1, 1800)))


def test_memory_of_a_process_is_read():
    assert private_bytes(threading.get_native_id()) > MEBIBYTE


def test_bug_in_the_log_is_a_violation():
    assert not list(checks.of_log("INFO: Started\nWARNING: Redis does not answer\n"))
    (only,) = checks.of_log("INFO\nERROR: Lookup failed\nTraceback (most recent call last):\n  x\nKeyError\n")
    assert "names 1 bugs" in only
    assert "KeyError" in only


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


def test_contents_of_rows_differ_everywhere():
    first, second = rows.content(0, 0).view("u8"), rows.content(0, 1).view("u8")
    assert len(set(first)) == len(first)
    assert not (first == second).any()
