"""A disk tier before its index is complete."""

import os
import threading

import pytest

from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.disk.files import Directory
from lmcache_store.tiers.disk.tier import DiskTier
from lmcache_store.tiers.probing import num_leading
from tests.harness.tiers.disk_world import PAGE, content, key_of, load, open_tier, store, taken_bytes


@pytest.fixture
def may_finish():
    """Let the scan end."""
    return threading.Event()


@pytest.fixture
def tier(tmp_path, monkeypatch, may_finish):
    """A tier with two objects; its scan has listed both and waits."""
    previous = open_tier(tmp_path, 32 * PAGE)
    store(previous, 1)
    store(previous, 2)
    previous.close()
    scan, has_listed = Directory.scan, threading.Event()

    def wait(directory):
        entries = list(scan(directory))
        has_listed.set()
        may_finish.wait(60)
        yield from entries

    monkeypatch.setattr(Directory, "scan", wait)
    tier = DiskTier(tmp_path, 32 * PAGE)
    assert has_listed.wait(60)
    yield tier
    may_finish.set()
    tier.close()


def test_finds_objects_by_name_before_the_index_is_complete(tier):
    assert tier.contains(ObjectId(key_of(1), 0))
    assert not tier.contains(ObjectId(key_of(3), 0))
    assert num_leading(tier, [key_of(1), key_of(2), key_of(3)], 1) == 2
    assert load(tier, 1) == content(1, PAGE)
    assert load(tier, 3) is None
    assert tier.touch([key_of(1), key_of(3)], 1) == {key_of(3)}
    assert store(tier, 1)  # the object is present
    assert not tier.indexed.is_set()


def test_objects_removed_during_the_scan_are_not_counted(tmp_path, tier, may_finish):
    assert tier.remove(ObjectId(key_of(1), 0))
    assert not tier.contains(ObjectId(key_of(1), 0))
    may_finish.set()
    assert tier.indexed.wait(60)
    assert not tier.contains(ObjectId(key_of(1), 0))
    assert tier.used_bytes == taken_bytes(tmp_path) == 2 * PAGE


def test_stores_wait_for_the_index(tier, may_finish):
    threading.Timer(0.05, may_finish.set).start()
    assert store(tier, 3)
    assert tier.used_bytes == 6 * PAGE


def test_stores_are_refused_after_the_wait_limit(tier, monkeypatch):
    monkeypatch.setattr(tier, "_wait_ends", 0.0)
    assert not store(tier, 3)
    assert tier.stats.refused == {"indexing": 1}


def test_late_thread_of_closed_tier_cannot_reach_another_directory(tmp_path):
    """An example is a probe that hangs while the tier closes."""
    directory = Directory(str(tmp_path / "closed"))
    directory.close()
    other = tmp_path / "other"
    other.mkdir()
    same_number = os.open(other, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for late_call in (directory.check, lambda: directory.reopen(0), lambda: list(directory.scan())):
            with pytest.raises(OSError, match="Bad file descriptor"):
                late_call()
        assert os.path.samestat(os.fstat(same_number), other.stat())
    finally:
        os.close(same_number)
    assert not list(other.iterdir())


def test_closing_does_not_wait_for_the_scan(tier, may_finish):
    tier._closing = True
    may_finish.set()
    tier._scan.join(60)
    assert not tier.indexed.is_set()


def test_disk_is_asked_for_no_row_behind_an_absent_one(tier, monkeypatch):
    """Before the index is complete, each question reads the directory."""
    asked: list[ObjectId] = []
    find_each = tier.find_each

    def note(ids):
        asked.extend(ids)
        return find_each(ids)

    monkeypatch.setattr(tier, "find_each", note)
    assert num_leading(tier, [key_of(number) for number in range(1, 9)], 1) == 2
    assert [object_id.row_key for object_id in asked] == [key_of(1), key_of(2), key_of(3)]
