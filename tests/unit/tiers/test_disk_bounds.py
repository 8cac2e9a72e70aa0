"""Upper bounds of the bytes that a tenant's objects take on disk."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache.tiers.base import ObjectId, OwnerBound
from lmcache.tiers.disk.tier import DiskTier

PAYLOAD = memoryview(bytes(4096))
OBJECT_BYTES = 8192  # with the header's page


def name(number: int) -> ObjectId:
    return ObjectId(bytes([number]) * 64, 0)


def store(tier: DiskTier, number: int, owner: str = "a", limit: int = 3 * OBJECT_BYTES) -> bool:
    is_admitted = tier.admits({name(number): len(PAYLOAD)}, OwnerBound(owner, limit))
    return is_admitted and tier.store_for(name(number), PAYLOAD, b"", b"", owner)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(path / "disk", 1 << 20)
    try:
        assert tier.indexed.wait(60)
        yield tier
    finally:
        tier.close()


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    with opened(tmp_path) as tier:
        yield tier


def test_owner_at_its_bound_stores_no_more_until_an_object_leaves(tier):
    assert [store(tier, number) for number in range(4)] == [True, True, True, False]
    assert store(tier, 10, "b")
    assert store(tier, 1), "an object that is stored already is only marked as used"
    assert tier.stats.refused["tenant"] == 1
    tier.remove(name(0))
    assert store(tier, 4)
    assert not store(tier, 5)
    assert store(tier, 5, limit=4 * OBJECT_BYTES)


def test_bound_admits_all_columns_of_a_row_or_none(tier):
    lengths = {ObjectId(bytes(64), column): len(PAYLOAD) for column in range(3)}
    assert not tier.admits(lengths, OwnerBound("a", 2 * OBJECT_BYTES))
    assert tier.admits(lengths, OwnerBound("a", 3 * OBJECT_BYTES))
    assert tier.store_for(ObjectId(bytes(64), 0), PAYLOAD, b"", b"", "a")
    assert tier.admits(lengths, OwnerBound("a", 3 * OBJECT_BYTES)), "the first column is stored already"
    assert not tier.admits(lengths, OwnerBound("a", 3 * OBJECT_BYTES - 1))


def test_objects_without_an_owner_do_not_count(tier):
    for number in range(5):
        assert tier.store(name(number), PAYLOAD)
    assert store(tier, 10)
    assert tier.bytes_by_owner() == {"a": OBJECT_BYTES}


def test_objects_from_before_a_restart_count_when_they_are_stored_again(tmp_path):
    with opened(tmp_path) as tier:
        assert [store(tier, number) for number in range(3)] == [True] * 3
    with opened(tmp_path) as tier:
        assert tier.used_bytes == 3 * OBJECT_BYTES
        assert not tier._index.bytes_by_owner
        assert [store(tier, number) for number in (0, 1, 2, 3)] == [True, True, True, False]
