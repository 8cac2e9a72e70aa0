"""A lower tier for an engine's own rows: late jobs, and jobs that end once.

tests/integration/test_vllm_tier*.py tests the rest with vLLM's own manager.
"""

import threading
import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from lmcache.engines.core import tier_access
from lmcache.engines.core.tier_access import TierAccess
from lmcache.tiers.disk.tier import DiskTier
from testing.child_process import wait_until

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


def test_job_ends_once(tier, rows):
    before = rows.copy()
    access = TierAccess(tier, rows, 60, 60)
    access.begin(1, KEYS, range(4), is_store=True)
    assert wait_until(access.take_ended) == [(1, [0, 1, 2, 3])]
    access.begin(2, [], [], is_store=False)
    access.begin(3, [KEYS[2], b"x" * 64, KEYS[0]], [3, 1, 2], is_store=False)
    access.drain()
    assert access.take_ended() == [(2, []), (3, [0, 2])]
    assert np.array_equal(rows, before[[0, 1, 0, 2]])
    assert access.close(60)
    access.begin(4, KEYS, range(4), is_store=True)
    assert access.take_ended() == [(4, [])]
    assert access.take_ended() == []


def test_late_job_ends_after_its_copy(tier, rows):
    """After the end of the job the engine owns the row, and nothing may write to it."""
    may_copy, is_copying = threading.Event(), threading.Event()
    copy = np.copyto

    def slow_copy(into, source):
        is_copying.set()
        assert may_copy.wait(60)
        copy(into, source)

    access = TierAccess(tier, rows, 60, 0.05)
    with mock.patch.object(tier_access.np, "copyto", slow_copy):
        access.begin(1, KEYS[:1], [0], is_store=True)
        assert is_copying.wait(60)
        time.sleep(0.1)  # real time: the limit of the job passes
        assert access.take_ended() == []
        may_copy.set()
        assert wait_until(access.take_ended) == [(1, [])]
    assert access.close(60)
    assert access.take_ended() == []


def test_late_tier_is_used_again_after_its_answer(tier, rows, monkeypatch):
    may_answer = threading.Event()
    store = tier.store
    monkeypatch.setattr(tier, "store", lambda *arguments: may_answer.wait(60) and store(*arguments))
    access = TierAccess(tier, rows, 60, 0.05)
    access.begin(1, KEYS[:1], [0], is_store=True)
    assert wait_until(access.take_ended) == [(1, [])]
    assert not access.is_available
    assert access.find("r", KEYS[0]) is False
    access.begin(2, KEYS[:1], [0], is_store=False)
    assert access.take_ended() == [(2, [])]
    may_answer.set()
    wait_until(lambda: access.is_available)
    assert access.close(60)


def test_answer_during_the_timeout_keeps_the_tier_available(tier, rows, monkeypatch):
    """Otherwise no call would be in progress that could detect that the tier answers."""
    is_called, may_answer = threading.Event(), threading.Event()
    find_each = tier.find_each

    def answer(ids):
        is_called.set()
        assert may_answer.wait(60)
        return find_each(ids)

    monkeypatch.setattr(tier, "find_each", answer)
    access = TierAccess(tier, rows, 60, 60)
    assert access.find("r", KEYS[0]) is None
    access.flush()
    assert is_called.wait(60)

    def late_time():
        """Return a time after the timeout, after the answer has arrived."""
        may_answer.set()
        access._finders.submit(lambda: None).result(60)
        return time.monotonic() + 61

    with mock.patch.object(tier_access, "time", SimpleNamespace(monotonic=late_time)):
        assert access.find("r", KEYS[0]) is False
    assert access.is_available
    assert access.close(60)
