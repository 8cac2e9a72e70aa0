"""One lower tier for an engine's own rows: jobs that end late, and each once. The rest is shown under vLLM's
own manager in tests/integration/test_vllm_tier*.py."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from lmcache.engines.core import tier_access
from lmcache.engines.core.tier_access import TierAccess
from lmcache.tiers.disk.tier import DiskTier

KEYS = [bytes([number]) * 64 for number in range(4)]


@pytest.fixture
def rows():
    return np.random.default_rng(0).integers(0, 256, (4, 4096), dtype=np.uint8)


@pytest.fixture
def tier(tmp_path):
    tier = DiskTier(tmp_path, 1 << 20)
    assert tier.indexed.wait(60)
    yield tier
    tier.close()


def ended(access, timeout=60.0):
    deadline = time.monotonic() + timeout
    while not (jobs := access.take_ended()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return jobs


def test_every_job_ends_once(tier, rows):
    before = rows.copy()
    access = TierAccess(tier, rows, 60, 60)
    access.begin(1, KEYS, range(4), is_store=True)
    assert ended(access) == [(1, [0, 1, 2, 3])]
    access.begin(2, [], [], is_store=False)
    access.begin(3, [KEYS[2], b"x" * 64, KEYS[0]], [3, 1, 2], is_store=False)
    access.drain()
    assert access.take_ended() == [(2, []), (3, [0, 2])]
    assert np.array_equal(rows, before[[0, 1, 0, 2]])
    assert access.close(60)
    access.begin(4, KEYS, range(4), is_store=True)
    assert access.take_ended() == [(4, [])]
    assert access.take_ended() == []


def test_a_late_job_ends_when_its_copy_has(tier, rows):
    """Its row is the engine's again from then on: nothing may be written to it."""
    may_copy, is_copying = threading.Event(), threading.Event()
    copy = np.copyto

    def slow(into, source):
        is_copying.set()
        assert may_copy.wait(60)
        copy(into, source)

    access = TierAccess(tier, rows, 60, 0.05)
    with mock.patch.object(tier_access.np, "copyto", slow):
        access.begin(1, KEYS[:1], [0], is_store=True)
        assert is_copying.wait(60)
        time.sleep(0.1)  # its time is over
        assert access.take_ended() == []
        may_copy.set()
        assert ended(access) == [(1, [])]
    assert access.close(60)
    assert access.take_ended() == []


def test_a_tier_that_was_late_is_asked_again_when_it_has_answered(tier, rows, monkeypatch):
    may_go_on = threading.Event()
    store = tier.store
    monkeypatch.setattr(tier, "store", lambda *arguments: may_go_on.wait(60) and store(*arguments))
    access = TierAccess(tier, rows, 60, 0.05)
    access.begin(1, KEYS[:1], [0], is_store=True)
    assert ended(access) == [(1, [])]
    assert not access.is_available
    assert access.find("r", KEYS[0]) is False
    access.begin(2, KEYS[:1], [0], is_store=False)
    assert access.take_ended() == [(2, [])]
    may_go_on.set()
    deadline = time.monotonic() + 60
    while not access.is_available:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert access.close(60)


def test_an_answer_that_comes_while_it_is_given_up_does_not_end_the_tier(tier, rows, monkeypatch):
    """Nothing would be under way that could find out that the tier answers."""
    is_asked, may_answer = threading.Event(), threading.Event()
    find_each = tier.find_each

    def answer(ids):
        is_asked.set()
        assert may_answer.wait(60)
        return find_each(ids)

    monkeypatch.setattr(tier, "find_each", answer)
    access = TierAccess(tier, rows, 60, 60)
    assert access.find("r", KEYS[0]) is None
    access.flush()
    assert is_asked.wait(60)

    def late():
        """The time that is looked at when nothing has come so far; then it comes."""
        may_answer.set()
        access._finders.submit(lambda: None).result(60)
        return time.monotonic() + 61

    with mock.patch.object(tier_access, "time", SimpleNamespace(monotonic=late)):
        assert access.find("r", KEYS[0]) is False
    assert access.is_available
    assert access.close(60)
