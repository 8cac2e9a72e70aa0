from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys

import pytest

from lmcache.tiers.base import ObjectId
from lmcache.tiers.disk.tier import DiskTier
from lmcache.tiers.errors import DiskError, TierError
from lmcache.tiers.header import HEADER_BYTES, digests, parse
from tests.harness.disk_world import (
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

SIZES = [0, 1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE, MIB + 7]


@pytest.fixture
def tier(tmp_path):
    tier = open_tier(tmp_path, 4 * MIB)
    yield tier
    tier.close()


def numbers(tier: DiskTier) -> list[int]:
    in_order = tier.keys()
    return [key[-1] for key in in_order]


class TestObjects:
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("shift", [0, 8], ids=["aligned", "elsewhere"])
    def test_round_trip(self, tmp_path, size, shift):
        tier = open_tier(tmp_path, 4 * MIB)
        payload, into = (memoryview(mmap.mmap(-1, size + 2 * PAGE))[shift:][:size] for _ in range(2))
        payload[:] = random.randbytes(size)
        assert tier.load(ObjectId(key_of(1), 3), into) is None
        assert tier.store(ObjectId(key_of(1), 3), payload, b"label")
        assert tier.load(ObjectId(key_of(1), 3), into).length == size
        assert into == payload
        assert tier.used_bytes == taken_bytes(tmp_path)
        tier.close()

    def test_memory_beyond_the_payload_is_left_alone(self, tier):
        store(tier, 1, PAGE + 5)
        into = memoryview(bytearray(b"x" * 3 * PAGE))
        assert tier.load(ObjectId(key_of(1), 0), into).length == PAGE + 5
        assert into == content(1, PAGE + 5) + b"x" * (2 * PAGE - 5)

    @pytest.mark.parametrize("length", [0, 1, PAGE - 1, PAGE + 1, 2 * PAGE])
    def test_an_object_of_another_length_is_a_miss_and_goes(self, tier, length):
        store(tier, 1, length)
        into = memoryview(bytearray(3 * PAGE))
        assert tier.load(ObjectId(key_of(1), 0), into, PAGE) is None
        assert tier.stats.invalid == {"length": 1}
        store(tier, 1, PAGE)
        assert tier.load(ObjectId(key_of(1), 0), into, PAGE).digests == digests(content(1, PAGE))

    def test_the_file_says_what_it_is(self, tmp_path, tier):
        store(tier, 1, 5, column=7)
        raw = file_of(tmp_path, 1, 7).read_bytes()
        header = parse(raw[:HEADER_BYTES])
        assert (header.key, header.column, header.label) == (key_of(1), 7, b"label")
        assert raw[PAGE:] == content(1, 5) + bytes(PAGE - 5)

    def test_probe_needs_all_columns_of_leading_rows(self, tier):
        for number, column in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 1), (3, 0), (3, 1)]:
            store(tier, number, column=column)
        assert tier.probe([key_of(number) for number in range(4)], 2) == 2
        assert tier.probe([], 2) == 0

    def test_each_object_is_found_by_itself(self, tier):
        for number, column in [(0, 0), (2, 0), (2, 1)]:
            store(tier, number, column=column)
        asked = [ObjectId(key_of(number), column) for number in range(4) for column in range(2)]
        assert tier.find_each(asked) == [True, False, False, False, True, True, False, False]

    def test_what_is_there_is_only_refreshed(self, tmp_path, tier):
        store(tier, 1)
        before = file_of(tmp_path, 1).stat()
        assert store(tier, 1)
        after = file_of(tmp_path, 1).stat()
        assert (after.st_ino, tier.stats.stored, tier.stats.touched) == (before.st_ino, 1, 1)
        assert after.st_mtime_ns > before.st_mtime_ns

    def test_remove(self, tmp_path, tier):
        store(tier, 1)
        assert tier.contains(ObjectId(key_of(1), 0))
        assert tier.remove(ObjectId(key_of(1), 0))
        assert not tier.remove(ObjectId(key_of(1), 0))
        assert not tier.contains(ObjectId(key_of(1), 0))
        assert tier.used_bytes == taken_bytes(tmp_path) == 0

    def test_keys_are_rows(self, tier):
        for column in range(3):
            store(tier, 1, column=column)
        assert tier.keys() == [key_of(1)]


class TestRoom:
    def test_bytes_are_bounded(self, tmp_path):
        tier = open_tier(tmp_path, 32 * PAGE)
        for number in range(100):
            assert store(tier, number, random.randrange(6 * PAGE))
            assert tier.used_bytes == taken_bytes(tmp_path) <= 32 * PAGE
        assert tier.stats.evicted > 80
        tier.close()

    def test_what_can_not_fit_evicts_nothing(self, tmp_path):
        tier = open_tier(tmp_path, 4 * PAGE)
        store(tier, 1)
        assert not store(tier, 2, 4 * PAGE)
        assert tier.stats.refused == {"capacity": 1}
        assert load(tier, 1) == content(1, PAGE)
        tier.close()

    def test_tails_go_before_heads(self, tmp_path):
        tier = open_tier(tmp_path, 128 * PAGE)  # an epoch has 8 of these objects
        for number in (*range(8), *range(100, 108)):
            store(tier, number)
        assert numbers(tier) == [*reversed(range(8)), *reversed(range(100, 108))]
        tier.touch([key_of(number) for number in range(4)], 1)
        assert numbers(tier) == [*reversed(range(4, 8)), *reversed(range(100, 108)), *reversed(range(4))]
        tier.close()

    def test_loads_count_as_use(self, tmp_path):
        tier = open_tier(tmp_path, 16 * PAGE)  # an epoch is one object
        for number in range(8):
            store(tier, number)
        load(tier, 0)
        store(tier, 8)
        assert numbers(tier) == [*range(2, 8), 0, 8]
        tier.close()

    def test_age_outlives_a_restart(self, tmp_path):
        tier = open_tier(tmp_path, 16 * PAGE)
        for number in range(8):
            store(tier, number)
        tier.touch([key_of(3)], 1)
        load(tier, 1)
        store(tier, 5)
        tier.close()
        tier = open_tier(tmp_path, 16 * PAGE)
        assert numbers(tier) == [0, 2, 4, 6, 7, 3, 1, 5]
        tier.close()

    def test_a_smaller_capacity_evicts_at_the_start(self, tmp_path):
        tier = open_tier(tmp_path, 64 * PAGE)
        for number in range(32):
            store(tier, number)
        store(tier, 99, 20 * PAGE)
        tier.close()
        tier = open_tier(tmp_path, 16 * PAGE)
        assert set(numbers(tier)) == set(range(24, 32))
        assert tier.used_bytes == taken_bytes(tmp_path) <= 16 * PAGE
        tier.close()

    def test_more_than_the_volume_is_refused(self, tmp_path):
        with pytest.raises(DiskError, match=r"more than 90% of the volume .* make the disk tier smaller"):
            DiskTier(tmp_path, 1 << 60)
        open_tier(tmp_path).close()  # the failed one has let go of the directory


def test_defect_04_a_flipped_byte_is_a_miss(tmp_path, tier):
    """Upstream wrote files without a checksum, under their final names, and returned what was in them."""
    for number, position in enumerate([0, 100, HEADER_BYTES - 1, PAGE, 3 * PAGE - 1]):
        store(tier, number, 2 * PAGE)
        file = file_of(tmp_path, number)
        raw = bytearray(file.read_bytes())
        raw[position] ^= 1
        file.write_bytes(raw)
        assert load(tier, number) is None
        assert not file.exists()
    assert tier.stats.invalid == {"header": 3, "checksum": 2}
    assert store(tier, 0)
    assert load(tier, 0) == content(0, PAGE)


def test_defect_04_a_file_gets_its_name_when_it_is_whole(tmp_path, tier, monkeypatch):
    seen = []
    rename = os.rename

    def watch(source, target, **options):
        seen.append((file_of(tmp_path, 1).exists(), (tmp_path / source).stat().st_size))
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", watch)
    store(tier, 1, 3 * PAGE)
    assert seen == [(False, 4 * PAGE)]
    assert not temporaries(tmp_path)


def test_defect_16_a_restart_finds_and_counts_what_is_there(tmp_path):
    """Upstream forgot its files at a restart: they were never found again, nor counted, nor deleted."""
    tier = open_tier(tmp_path, 32 * PAGE)
    for number in range(16):
        store(tier, number)
    tier.close()
    tier = open_tier(tmp_path, 32 * PAGE)
    assert all(tier.contains(ObjectId(key_of(number), 0)) for number in range(16))
    assert tier.used_bytes == taken_bytes(tmp_path) == 32 * PAGE
    assert store(tier, 16)
    assert tier.used_bytes == taken_bytes(tmp_path) == 32 * PAGE
    assert tier.stats.evicted == 1
    tier.close()


class TestDirectory:
    def test_is_for_one_tier(self, tmp_path, tier):
        with pytest.raises(DiskError, match="in use by another process: give each"):
            DiskTier(tmp_path, MIB)

    def test_is_for_one_process(self, tmp_path, tier):
        program = f"from lmcache.tiers.disk.tier import DiskTier; DiskTier({str(tmp_path)!r}, 1 << 20)"
        child = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, check=False)
        assert b"in use by another process" in child.stderr

    def test_is_made(self, tmp_path):
        open_tier(tmp_path / "a" / "b").close()
        assert (tmp_path / "a" / "b").is_dir()

    def test_that_is_none_is_refused(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(TierError, match="can't hold a disk tier"):
            DiskTier(tmp_path / "file", MIB)

    def test_may_be_relative(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        tier = open_tier("here")
        monkeypatch.chdir("/")
        store(tier, 1)
        assert file_of(tmp_path / "here", 1).exists()
        tier.close()
