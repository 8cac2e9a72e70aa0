"""A disk tier whose index is not rebuilt yet."""

from __future__ import annotations

import os
import threading
import time

import pytest

from lmcache.tiers.base import ObjectId
from lmcache.tiers.disk.files import Directory
from lmcache.tiers.disk.tier import DiskTier
from tests.harness.disk_world import PAGE, content, key_of, load, open_tier, store, taken_bytes


@pytest.fixture
def go_on():
    """Ends the scan."""
    return threading.Event()


@pytest.fixture
def tier(tmp_path, monkeypatch, go_on):
    """A tier with two objects, the scan of which has seen all and waits."""
    last = open_tier(tmp_path, 32 * PAGE)
    store(last, 1)
    store(last, 2)
    last.close()
    scan, has_seen = Directory.scan, threading.Event()

    def wait(directory):
        found = list(scan(directory))
        has_seen.set()
        go_on.wait(60)
        yield from found

    monkeypatch.setattr(Directory, "scan", wait)
    tier = DiskTier(tmp_path, 32 * PAGE)
    assert has_seen.wait(60)
    yield tier
    go_on.set()
    tier.close()


def test_objects_are_found_by_name(tier):
    assert tier.contains(ObjectId(key_of(1), 0))
    assert not tier.contains(ObjectId(key_of(3), 0))
    assert tier.probe([key_of(1), key_of(2), key_of(3)], 1) == 2
    assert load(tier, 1) == content(1, PAGE)
    assert load(tier, 3) is None
    tier.touch([key_of(1)], 1)
    assert store(tier, 1)  # it is there
    assert not tier.indexed.is_set()


def test_what_goes_meanwhile_is_not_counted(tmp_path, tier, go_on):
    assert tier.remove(ObjectId(key_of(1), 0))
    assert not tier.contains(ObjectId(key_of(1), 0))
    go_on.set()
    assert tier.indexed.wait(60)
    assert not tier.contains(ObjectId(key_of(1), 0))
    assert tier.used_bytes == taken_bytes(tmp_path) == 2 * PAGE


def test_stores_wait(tier, go_on, monkeypatch):
    monkeypatch.setattr(tier, "_wait_ends", time.monotonic() + 60)
    threading.Timer(0.05, go_on.set).start()
    assert store(tier, 3)
    assert tier.used_bytes == 6 * PAGE


def test_stores_are_refused_in_the_end(tier, monkeypatch):
    monkeypatch.setattr(tier, "_wait_ends", 0.0)
    assert not store(tier, 3)
    assert tier.stats.refused == {"indexing": 1}


def test_a_thread_that_outlives_the_tier_meets_no_file_of_others(tmp_path):
    """A probe that hung over a closing, say."""
    directory = Directory(str(tmp_path / "ours"))
    directory.close()
    others = tmp_path / "others"
    others.mkdir()
    same_number = os.open(others, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for late in (directory.check, lambda: directory.reopen(0), lambda: list(directory.scan())):
            with pytest.raises(OSError, match="Bad file descriptor"):
                late()
        assert os.path.samestat(os.fstat(same_number), others.stat())
    finally:
        os.close(same_number)
    assert not list(others.iterdir())


def test_closing_does_not_wait_for_the_index(tier, go_on):
    tier._closing = True
    go_on.set()
    tier._scan.join(60)
    assert not tier.indexed.is_set()
