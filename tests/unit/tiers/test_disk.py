import mmap
import os
import random

import pytest

from lmcache_store.tiers.base import ObjectId, OwnerBound
from lmcache_store.tiers.disk.file_formats import PIECE_BYTES
from lmcache_store.tiers.disk.tier import DiskTier
from lmcache_store.tiers.errors import DiskError
from lmcache_store.tiers.header import HEADER_BYTES, digests, parse
from tests.harness.tiers.disk_world import (
    MIB,
    PAGE,
    content,
    file_of,
    key_of,
    load,
    open_tier,
    store,
    taken_bytes,
    temporaries,
)
from tests.harness.tiers.encryption import cipher

SIZES = [
    *(0, 1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE, MIB + 7),
    *(PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES + PAGE),
]


def numbers(tier: DiskTier) -> list[int]:
    in_order = tier.keys()
    return [key[-1] for key in in_order]


class TestObjects:
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("shift", [0, 8], ids=["aligned", "unaligned"])
    @pytest.mark.parametrize("used", [None, cipher("disk", 1)], ids=["plain", "encrypted"])
    def test_loads_the_stored_bytes(self, path, restart, size, shift, used):
        tier, object_id = restart(64 * MIB, used), ObjectId(key_of(1), 3)
        payload, into = (memoryview(mmap.mmap(-1, size + 2 * PAGE))[shift:][:size] for _ in range(2))
        payload[:] = random.randbytes(size)
        assert tier.load(object_id, into) is None
        assert tier.store(object_id, payload, b"label")
        loaded = tier.load(object_id, into)
        assert (loaded.length, loaded.digests) == (size, digests(payload))
        assert into == payload
        assert tier.indexed.wait(60)
        assert tier.used_bytes == taken_bytes(path)
        assert tier.load(object_id, into, size + 1) is None, "another length is expected"

    def test_load_leaves_memory_beyond_the_payload_unchanged(self, tier):
        store(tier, 1, PAGE + 5)
        into = memoryview(bytearray(b"x" * 3 * PAGE))
        assert tier.load(ObjectId(key_of(1), 0), into).length == PAGE + 5
        assert into == content(1, PAGE + 5) + b"x" * (2 * PAGE - 5)

    @pytest.mark.parametrize("length", [0, 1, PAGE - 1, PAGE + 1, 2 * PAGE])
    def test_object_of_another_length_is_a_miss_and_is_deleted(self, tier, length):
        store(tier, 1, length)
        into = memoryview(bytearray(3 * PAGE))
        assert tier.load(ObjectId(key_of(1), 0), into, PAGE) is None
        assert tier.stats.invalid == {"length": 1}
        store(tier, 1, PAGE)
        assert tier.load(ObjectId(key_of(1), 0), into, PAGE).digests == digests(content(1, PAGE))

    def test_file_header_identifies_the_object(self, path, tier):
        store(tier, 1, 5, column=7)
        raw = file_of(path, 1, 7).read_bytes()
        header = parse(raw[:HEADER_BYTES])
        assert (header.key, header.column, header.label) == (key_of(1), 7, b"label")
        assert raw[PAGE:] == content(1, 5) + bytes(PAGE - 5)

    def test_find_each_checks_objects_separately(self, tier):
        for number, column in [(0, 0), (2, 0), (2, 1)]:
            store(tier, number, column=column)
        objects = [ObjectId(key_of(number), column) for number in range(4) for column in range(2)]
        assert tier.find_each(objects) == [True, False, False, False, True, True, False, False]

    def test_store_of_present_object_only_refreshes_its_age(self, path, tier):
        store(tier, 1)
        before = file_of(path, 1).stat()
        assert store(tier, 1)
        after = file_of(path, 1).stat()
        assert (after.st_ino, tier.stats.stored, tier.stats.touched) == (before.st_ino, 1, 1)
        assert after.st_mtime_ns > before.st_mtime_ns


class TestCapacity:
    def test_refuses_object_larger_than_capacity_without_eviction(self, restart):
        tier = restart(4 * PAGE)
        store(tier, 1)
        assert not store(tier, 2, 4 * PAGE)
        assert tier.stats.refused == {"capacity": 1}
        assert load(tier, 1) == content(1, PAGE)

    def test_smaller_capacity_evicts_at_start(self, path, restart):
        tier = restart(64 * PAGE)
        for number in range(32):
            store(tier, number)
        store(tier, 99, 20 * PAGE)
        tier = restart(16 * PAGE)
        assert tier.indexed.wait(60)
        assert set(numbers(tier)) == set(range(24, 32))
        assert tier.used_bytes == taken_bytes(path) <= 16 * PAGE

    def test_refuses_capacity_larger_than_the_volume(self, tmp_path):
        with pytest.raises(DiskError, match=r"more than 90% of the volume .* reduce the disk tier"):
            DiskTier(tmp_path, 1 << 60)
        open_tier(tmp_path).close()  # the failed tier has released the directory


def test_defect_04_file_gets_its_final_name_when_complete(path, tier, monkeypatch):
    renames = []
    rename = os.rename

    def watch(source, target, **options):
        renames.append((file_of(path, 1).exists(), (path / source).stat().st_size))
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", watch)
    store(tier, 1, 3 * PAGE)
    assert renames == [(False, 4 * PAGE)]
    assert not temporaries(path)


class TestDirectory:
    def test_accepts_relative_path_of_missing_directories(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        tier = open_tier("missing/relative")
        monkeypatch.chdir("/")
        store(tier, 1)
        assert file_of(tmp_path / "missing" / "relative", 1).exists()
        tier.close()


OBJECT_BYTES = 2 * PAGE  # with the header's page


def store_for(tier: DiskTier, number: int, owner: str = "a", limit: int = 3 * OBJECT_BYTES) -> bool:
    object_id = ObjectId(key_of(number), 0)
    is_admitted = tier.admits({object_id: PAGE}, OwnerBound(owner, limit))
    is_stored = is_admitted and tier.store(object_id, memoryview(bytes(PAGE)))
    tier.assign(object_id, owner)
    return is_stored


class TestBoundsOfOwners:
    def test_owner_at_its_bound_stores_no_more_until_an_object_leaves(self, tier):
        assert [store_for(tier, number) for number in range(4)] == [True, True, True, False]
        assert store_for(tier, 10, "b")
        assert store_for(tier, 1), "an object that is stored already is only marked as used"
        assert tier.stats.refused["tenant"] == 1
        tier.remove(ObjectId(key_of(0), 0))
        assert store_for(tier, 4)
        assert not store_for(tier, 5)
        assert store_for(tier, 5, limit=4 * OBJECT_BYTES)

    def test_bound_admits_all_columns_of_a_row_or_none(self, tier):
        lengths = {ObjectId(key_of(0), column): PAGE for column in range(3)}
        assert not tier.admits(lengths, OwnerBound("a", 2 * OBJECT_BYTES))
        assert tier.admits(lengths, OwnerBound("a", 3 * OBJECT_BYTES))
        assert store_for(tier, 0)
        assert tier.admits(lengths, OwnerBound("a", 3 * OBJECT_BYTES)), "the first column is stored already"
        assert not tier.admits(lengths, OwnerBound("a", 3 * OBJECT_BYTES - 1))

    def test_objects_without_an_owner_do_not_count(self, tier):
        for number in range(5):
            assert store(tier, number)
        assert store_for(tier, 10)
        assert tier.bytes_by_owner() == {"a": OBJECT_BYTES}

    def test_objects_from_before_a_restart_count_when_they_are_stored_again(self, restart):
        tier = restart()
        assert [store_for(tier, number) for number in range(3)] == [True] * 3
        tier = restart()
        assert tier.indexed.wait(60)
        assert tier.used_bytes == 3 * OBJECT_BYTES
        assert not tier._index.bytes_by_owner
        assert [store_for(tier, number) for number in (0, 1, 2, 3)] == [True, True, True, False]
