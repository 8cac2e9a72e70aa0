"""A disk tier on a volume that fails, fills up, or holds what is not ours."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from lmcache.tiers.base import ObjectId
from lmcache.tiers.disk.tier import DiskTier
from lmcache.tiers.errors import DiskError, TierUnavailableError
from tests.harness.disk_world import (
    MIB,
    PAGE,
    content,
    failing,
    file_of,
    key_of,
    load,
    open_tier,
    store,
    taken_bytes,
    temporaries,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tier"


@pytest.fixture
def restart(path):
    """Start a tier in place of the last one, and don't wait for its index."""
    running = []

    def stop() -> None:
        while running:
            running.pop().close()

    def start(capacity: int = 32 * PAGE) -> DiskTier:
        stop()
        running.append(DiskTier(path, capacity))
        return running[0]

    yield start
    stop()


@pytest.fixture
def tier(restart):
    return restart()


def address_of(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data


def check_away(tier: DiskTier) -> None:
    """Everything raises at once, and nothing is lost track of."""
    assert tier.health.is_open
    with pytest.raises(TierUnavailableError):
        store(tier, 99)
    with pytest.raises(TierUnavailableError):
        load(tier, 1)
    for ask in (tier.contains, tier.remove):
        with pytest.raises(TierUnavailableError):
            ask(ObjectId(key_of(1), 0))
    with pytest.raises(TierUnavailableError):
        tier.probe([key_of(1)], 1)
    with pytest.raises(TierUnavailableError):
        tier.touch([key_of(1)], 1)


def damage_symlink(file):
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def damage_pipe(file):
    file.unlink()
    os.mkfifo(file)


def damage_folder(file):
    file.unlink()
    file.mkdir()


def damage_swap(file):
    file.write_bytes(file.with_name(file.name[:-1] + "1").read_bytes())


DAMAGES = {
    "truncated": (lambda file: os.truncate(file, 2 * PAGE), "length"),
    "cut within a page": (lambda file: os.truncate(file, 2 * PAGE + 1), "length"),
    "empty": (lambda file: os.truncate(file, 0), "length"),
    "too long": (lambda file: os.truncate(file, 100 * PAGE), "length"),
    "a page too long": (lambda file: os.truncate(file, 4 * PAGE), "length"),
    "zeros": (lambda file: file.write_bytes(bytes(3 * PAGE)), "header"),
    "another object's": (damage_swap, "name"),
    "a link": (damage_symlink, "type"),
    "a pipe": (damage_pipe, "type"),
}


class TestWrongFiles:
    @pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES)
    @pytest.mark.parametrize("is_aligned", [False, True])
    def test_are_a_miss_and_go(self, path, tier, damage, reason, is_aligned):
        store(tier, 1, 2 * PAGE)
        store(tier, 1, 2 * PAGE, column=1)
        damage(file_of(path, 1))
        if is_aligned:
            memory = memoryview(bytearray(20 * PAGE))
            start = -address_of(memory) % PAGE
            assert tier.load(ObjectId(key_of(1), 0), memory[start:][: 16 * PAGE]) is None
        else:
            assert load(tier, 1) is None
        assert tier.stats.invalid == {reason: 1}
        assert not os.path.lexists(file_of(path, 1))
        assert not tier.contains(ObjectId(key_of(1), 0))
        assert tier.used_bytes == 3 * PAGE
        assert store(tier, 1, 2 * PAGE)
        assert load(tier, 1) == content(1, 2 * PAGE)

    def test_a_folder_of_this_name_stays_and_refuses(self, path, tier):
        store(tier, 1)
        damage_folder(file_of(path, 1))
        assert load(tier, 1) is None
        assert not store(tier, 1)
        assert tier.stats.refused == {"EISDIR": 1}
        assert not tier.health.is_open
        assert tier.used_bytes == 0
        assert not temporaries(path)

    def test_a_file_in_place_of_a_folder_stays_and_refuses(self, path, tier):
        file_of(path, 1).parent.parent.mkdir()
        file_of(path, 1).parent.touch()
        assert load(tier, 1) is None
        assert not store(tier, 1)
        assert tier.stats.refused == {"ENOTDIR": 1}

    def test_deleted_by_somebody_else(self, path, tier):
        store(tier, 1)
        file_of(path, 1).unlink()
        assert load(tier, 1) is None
        assert tier.used_bytes == 0
        assert store(tier, 1)
        assert load(tier, 1) == content(1, PAGE)

    def test_a_store_of_what_somebody_else_deleted_writes_it(self, path, tier):
        store(tier, 1)
        file_of(path, 1).unlink()
        assert store(tier, 1)
        assert load(tier, 1) == content(1, PAGE)
        assert tier.used_bytes == taken_bytes(path) == 2 * PAGE

    def test_of_others_are_left_alone(self, path, tier, restart):
        store(tier, 1)
        folder = file_of(path, 1).parent
        name = file_of(path, 1).name
        misplaced = folder.parent / "ff" / name
        others = [path / "notes.txt", folder / "x.tmp", folder / f"{name}.old", folder / f"{name}0000000000"]
        others += [folder / f"{name[:-1]}01", path / "ff" / "aa" / "x.1.tmp", misplaced]
        for file in others:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(bytes(PAGE))
        (folder / name.replace(".0", ".2")).symlink_to(path / "notes.txt")
        tier = restart(2 * PAGE)
        for number in range(2, 12):
            store(tier, number)
        assert tier.used_bytes == 2 * PAGE
        assert all(file.exists() for file in others)

    def test_temporaries_of_the_dead_are_swept(self, path, tier, restart):
        store(tier, 1)
        (leftover := file_of(path, 1).with_name(f"{file_of(path, 1).name}.12345.tmp")).touch()
        tier = restart()
        assert tier.indexed.wait(60)
        assert not leftover.exists()
        assert load(tier, 1) == content(1, PAGE)


class TestUnhealthyVolume:
    @pytest.mark.parametrize("error", [errno.EIO, errno.EROFS, errno.EACCES, errno.ENOENT, errno.EMFILE])
    @pytest.mark.parametrize("function", ["pwritev", "rename", "open"])
    def test_a_store_that_fails_opens_the_circuit(self, path, tier, function, error):
        store(tier, 1)
        with failing(function, error):
            with pytest.raises(TierUnavailableError):
                store(tier, 2)
            check_away(tier)
            assert not tier.health.probe()
        assert tier.health.probe()
        assert not temporaries(path)
        assert load(tier, 1) == content(1, PAGE)
        assert tier.used_bytes == taken_bytes(path) == 2 * PAGE
        assert store(tier, 2)

    @pytest.mark.parametrize("function", ["preadv", "open", "fstat"])
    def test_a_load_that_fails_opens_the_circuit(self, path, tier, function):
        store(tier, 1)
        with failing(function, errno.EIO):
            with pytest.raises(TierUnavailableError):
                load(tier, 1)
            check_away(tier)
            assert not tier.health.probe()
        assert tier.health.probe()
        assert load(tier, 1) is None  # its block may be bad: it would open the circuit again
        assert tier.used_bytes == taken_bytes(path) == 0

    def test_an_object_that_may_not_be_read_goes(self, path, tier):
        store(tier, 1)
        with failing("open", errno.EACCES):
            assert load(tier, 1) is None
        assert tier.stats.invalid == {"type": 1}
        assert tier.used_bytes == taken_bytes(path) == 0

    def test_an_eviction_that_fails_opens_the_circuit(self, path, tier):
        for number in range(16):
            store(tier, number)
        with failing("unlink", errno.EROFS), pytest.raises(TierUnavailableError):
            store(tier, 16)
        assert tier.health.probe()
        assert store(tier, 16)
        assert tier.used_bytes == taken_bytes(path) == 32 * PAGE

    def test_a_probe_reads_what_it_wrote(self, tier, monkeypatch):
        tier.health.failure()
        real = os.preadv

        def wrong(fd, buffers, offset):
            count = real(fd, buffers, offset)
            buffers[-1][-1] ^= 1
            return count

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", wrong)
            assert not tier.health.probe()
        assert tier.health.probe()

    def test_a_directory_that_vanishes(self, path, tier):
        store(tier, 1)
        shutil.rmtree(path)
        assert load(tier, 1) is None
        with pytest.raises(TierUnavailableError):
            store(tier, 1)
        check_away(tier)
        assert not tier.health.probe()
        assert not path.exists()

    def test_a_directory_that_is_emptied(self, path, tier):
        store(tier, 1)
        for entry in path.iterdir():
            shutil.rmtree(entry)
        assert load(tier, 1) is None
        assert store(tier, 1)
        assert load(tier, 1) == content(1, PAGE)

    def test_a_directory_that_is_moved_away_goes_on(self, path, tier):
        store(tier, 1)
        path.rename(path.with_name("moved"))
        assert load(tier, 1) == content(1, PAGE)
        assert store(tier, 2)
        assert not path.exists()

    def test_a_scan_that_fails_is_made_again_once_somebody_stores(self, tier, restart):
        store(tier, 1)
        with failing("fwalk", errno.EIO):
            tier = restart()
            tier._scan.join()
        assert load(tier, 1) == content(1, PAGE)
        with pytest.raises(TierUnavailableError):
            store(tier, 2)
        check_away(tier)
        assert tier.health.probe()
        assert tier.indexed.wait(60)
        assert tier.used_bytes == 2 * PAGE
        assert store(tier, 2)

    def test_of_many_that_try_at_once_one_lists_the_directory(self, tier, monkeypatch):
        tier.indexed.wait(60)
        may_end, num_threads = threading.Event(), 16
        everybody = threading.Barrier(num_threads)
        scans = []

        def scan() -> list:
            scans.append(1)
            may_end.wait(60)
            return []

        monkeypatch.setattr(tier._directory, "scan", scan)
        monkeypatch.setattr(tier._directory, "check", everybody.wait)
        tier._scan.join()
        tier.indexed.clear()
        with ThreadPoolExecutor(num_threads) as pool:
            assert all(pool.map(lambda _: tier.health.probe(), range(num_threads)))
        may_end.set()
        assert tier.indexed.wait(60)
        tier._scan.join()
        assert scans == [1]

    def test_a_clock_that_was_far_ahead_stops_no_scan(self, path, tier, restart):
        store(tier, 1)
        store(tier, 2)
        os.utime(file_of(path, 1), ns=(1 << 63, 1 << 63))
        tier = restart()
        assert tier.indexed.wait(60)
        assert tier.keys() == [key_of(1), key_of(2)]  # of what was used together the last goes first

    def test_a_start_that_fails_says_why(self, path):
        with failing("pwritev", errno.EROFS), pytest.raises(DiskError, match="Read-only file system"):
            DiskTier(path, MIB)


class TestFullVolume:
    def test_evicts_below_the_capacity(self, volume):
        tier = open_tier(volume, 900 << 10)
        (volume / "others").write_bytes(bytes(512 << 10))
        for number in range(60):
            assert store(tier, number, 15 * PAGE)
            assert load(tier, number) == content(number, 15 * PAGE)
            assert tier.used_bytes == taken_bytes(volume) - (512 << 10)
        assert tier.stats.evicted > 40
        tier.close()

    def test_refuses_when_all_of_it_is_others(self, volume):
        tier = open_tier(volume, 512 << 10)
        store(tier, 1)
        with contextlib.suppress(OSError):
            (volume / "others").write_bytes(bytes(MIB))
        assert not store(tier, 2, 15 * PAGE)
        assert tier.stats.refused == {"ENOSPC": 1}
        assert not tier.health.is_open
        tier.health.failure()
        assert tier.health.probe()
        assert not temporaries(volume)
        (volume / "others").unlink()
        assert store(tier, 2, 15 * PAGE)
        tier.close()

    def test_read_only_in_mid_work(self, volume):
        tier = open_tier(volume, 512 << 10)
        assert tier.health.problem == ""
        store(tier, 1)
        subprocess.run(["mount", "-o", "remount,ro", volume], check=True)
        with pytest.raises(TierUnavailableError):
            store(tier, 2)
        check_away(tier)
        assert not tier.health.probe()
        assert "Read-only file system" in tier.health.problem
        subprocess.run(["mount", "-o", "remount,rw", volume], check=True)
        assert tier.health.probe()
        assert tier.health.problem == ""
        assert load(tier, 1) == content(1, PAGE)
        assert store(tier, 2)
        tier.close()

    def test_a_volume_that_goes_leaves_what_lies_below_alone(self, volume):
        tier = open_tier(volume, 512 << 10)
        store(tier, 1)
        subprocess.run(["umount", "-l", volume], check=True)
        assert store(tier, 2)
        assert load(tier, 2) == content(2, PAGE)
        assert list(volume.iterdir()) == []
        tier.close()
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", volume], check=True)  # for the fixture to unmount

    def test_without_direct_access(self, restart, monkeypatch):
        real = os.open

        def refuse(target, flags, *arguments, **options):
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no O_DIRECT here")
            return real(target, flags, *arguments, **options)

        monkeypatch.setattr(os, "open", refuse)
        tier = restart()
        memory = memoryview(bytearray(3 * PAGE))
        start = -address_of(memory) % PAGE
        assert tier.store(ObjectId(key_of(1), 0), memory[start:][:PAGE])
        assert tier.load(ObjectId(key_of(1), 0), memory[start:][:PAGE]).length == PAGE
