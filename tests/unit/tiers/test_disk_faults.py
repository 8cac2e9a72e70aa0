"""A disk tier on a volume that fails or fills up."""

import contextlib
import errno
import itertools
import os
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.disk.tier import DiskTier
from lmcache_store.tiers.errors import DiskError, TierUnavailableError
from lmcache_store.tiers.probing import num_leading
from tests.harness.tiers.disk_restarts import address_of
from tests.harness.tiers.disk_world import (
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

pytestmark = pytest.mark.usefixtures("no_prober")


def check_unavailable(tier: DiskTier) -> None:
    """Check that all operations fail at once."""
    assert tier.health.is_open
    object_id = ObjectId(key_of(1), 0)
    for operation in (
        lambda: store(tier, 99),
        lambda: load(tier, 1),
        lambda: tier.contains(object_id),
        lambda: tier.remove(object_id),
        lambda: num_leading(tier, [key_of(1)], 1),
        lambda: tier.touch([key_of(1)], 1),
    ):
        with pytest.raises(TierUnavailableError):
            operation()


class TestUnhealthyVolume:
    @pytest.mark.parametrize("error", [errno.EIO, errno.EROFS, errno.EACCES, errno.ENOENT, errno.EMFILE])
    @pytest.mark.parametrize("function", ["pwritev", "rename", "open"])
    def test_failed_store_opens_the_circuit(self, path, tier, function, error):
        store(tier, 1)
        with failing(function, error):
            with pytest.raises(TierUnavailableError):
                store(tier, 2)
            check_unavailable(tier)
            assert not tier.health.probe()
            assert os.strerror(error) in tier.health.problem
        assert tier.health.probe()
        assert tier.health.problem == ""
        assert not temporaries(path)
        assert load(tier, 1) == content(1, PAGE)
        assert tier.used_bytes == taken_bytes(path) == 2 * PAGE
        assert store(tier, 2)

    @pytest.mark.parametrize("function", ["preadv", "open", "fstat"])
    def test_failed_load_opens_the_circuit(self, path, tier, function):
        store(tier, 1)
        with failing(function, errno.EIO):
            with pytest.raises(TierUnavailableError):
                load(tier, 1)
            check_unavailable(tier)
            assert not tier.health.probe()
        assert tier.health.probe()
        assert load(tier, 1) is None  # the tier deletes the object, because its block may be bad
        assert tier.used_bytes == taken_bytes(path) == 0

    def test_unreadable_object_is_deleted(self, path, tier):
        store(tier, 1)
        with failing("open", errno.EACCES):
            assert load(tier, 1) is None
        assert tier.stats.invalid == {"type": 1}
        assert tier.used_bytes == taken_bytes(path) == 0

    def test_failed_eviction_opens_the_circuit(self, path, tier):
        for number in range(16):
            store(tier, number)
        with failing("unlink", errno.EROFS), pytest.raises(TierUnavailableError):
            store(tier, 16)
        assert tier.health.probe()
        assert store(tier, 16)
        assert tier.used_bytes == taken_bytes(path) == 32 * PAGE

    def test_probe_verifies_its_bytes(self, tier, monkeypatch):
        tier.health.failure()
        real = os.preadv

        def read_wrong_bytes(fd, buffers, offset):
            count = real(fd, buffers, offset)
            buffers[-1][-1] ^= 1
            return count

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", read_wrong_bytes)
            assert not tier.health.probe()
        assert tier.health.probe()

    def test_emptied_directory_is_usable(self, path, tier):
        store(tier, 1)
        for entry in path.iterdir():
            shutil.rmtree(entry)
        assert load(tier, 1) is None
        assert store(tier, 1)
        assert load(tier, 1) == content(1, PAGE)

    def test_moved_directory_is_usable(self, path, tier):
        store(tier, 1)
        path.rename(path.with_name("moved"))
        assert load(tier, 1) == content(1, PAGE)
        assert store(tier, 2)
        assert not path.exists()

    def test_failed_scan_is_repeated_after_a_probe(self, tier, restart):
        store(tier, 1)
        with failing("fwalk", errno.EIO):
            tier = restart()
            tier._scan.join()
        assert load(tier, 1) == content(1, PAGE)
        with pytest.raises(TierUnavailableError):
            store(tier, 2)
        check_unavailable(tier)
        assert tier.health.probe()
        assert tier.indexed.wait(60)
        assert tier.used_bytes == 2 * PAGE
        assert store(tier, 2)

    def test_concurrent_probes_start_a_single_scan(self, tier, monkeypatch):
        may_end, num_threads = threading.Event(), 16
        barrier = threading.Barrier(num_threads)
        scans = []

        def scan() -> list:
            scans.append(1)
            may_end.wait(60)
            return []

        monkeypatch.setattr(tier._directory, "scan", scan)
        monkeypatch.setattr(tier._directory, "check", barrier.wait)
        tier._scan.join()
        tier.indexed.clear()
        with ThreadPoolExecutor(num_threads) as pool:
            assert all(pool.map(lambda _: tier.health.probe(), range(num_threads)))
        may_end.set()
        assert tier.indexed.wait(60)
        tier._scan.join()
        assert scans == [1]

    def test_file_time_in_the_far_future_does_not_stop_the_scan(self, path, tier, restart):
        store(tier, 1)
        store(tier, 2)
        os.utime(file_of(path, 1), ns=(1 << 63, 1 << 63))
        tier = restart()
        assert tier.indexed.wait(60)
        assert tier.keys() == [key_of(1), key_of(2)]  # the last of objects of one age is evicted first

    def test_failed_start_reports_the_cause(self, path):
        with failing("pwritev", errno.EROFS), pytest.raises(DiskError, match="Read-only file system"):
            DiskTier(path, MIB)


@pytest.fixture
def small(volume):
    """A tier on a volume of 1 MiB."""
    with contextlib.closing(open_tier(volume, 512 << 10)) as tier:
        yield tier


class TestFullVolume:
    def test_evicts_when_the_volume_is_full_below_capacity(self, volume):
        tier = open_tier(volume, 900 << 10)
        (volume / "foreign").write_bytes(bytes(512 << 10))
        for number in range(24):
            assert store(tier, number, 15 * PAGE)
            assert load(tier, number) == content(number, 15 * PAGE)
            assert tier.used_bytes == taken_bytes(volume) - (512 << 10)
        assert tier.stats.evicted > 10
        tier.close()

    def test_refuses_stores_when_foreign_files_fill_the_volume(self, volume, small):
        store(small, 1)
        with contextlib.suppress(OSError):
            (volume / "foreign").write_bytes(bytes(MIB))
        assert not store(small, 2, 15 * PAGE)
        assert small.stats.refused == {"ENOSPC": 1}
        assert not small.health.is_open
        small.health.failure()
        assert small.health.probe()
        assert not temporaries(volume)
        (volume / "foreign").unlink()
        assert store(small, 2, 15 * PAGE)

    def test_works_without_direct_io(self, restart, monkeypatch):
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


def test_slow_deletion_delays_no_load_of_another_row(tier, monkeypatch):
    lock = tier._name_lock(ObjectId(key_of(1), 0))
    places = itertools.product(range(2, 256), range(50))
    number, column = next(
        place for place in places if tier._name_lock(ObjectId(key_of(place[0]), place[1])) is lock
    )
    assert store(tier, 1)
    assert store(tier, number, column=column)
    began, may_end, remove = threading.Event(), threading.Event(), tier._directory.remove

    def remove_slowly(object_id: ObjectId) -> bool:
        began.set()
        assert may_end.wait(60)
        return remove(object_id)

    monkeypatch.setattr(tier._directory, "remove", remove_slowly)
    with ThreadPoolExecutor() as pool:
        deletion = pool.submit(tier.remove, ObjectId(key_of(1), 0))
        assert began.wait(60)
        try:
            assert pool.submit(load, tier, number, column=column).result(10) == content(number, PAGE)
        finally:
            may_end.set()
        assert deletion.result(60)


# ---- a directory or volume that is replaced while the tier runs ----


def test_uses_recreated_directory_after_a_probe(path):
    tier = open_tier(path)
    store(tier, 1)
    store(tier, 2)
    shutil.rmtree(path)
    assert load(tier, 1) is None
    with pytest.raises(TierUnavailableError):
        store(tier, 3)
    check_unavailable(tier)
    assert not tier.health.probe()
    assert not path.exists()
    path.mkdir()
    assert tier.health.probe()
    assert tier.indexed.wait(60)
    assert (load(tier, 1), tier.used_bytes) == (None, 0)
    assert store(tier, 2)
    assert load(tier, 2) == content(2, PAGE)
    assert tier.used_bytes == taken_bytes(path)
    with pytest.raises(DiskError, match="in use by another process: give each"):
        DiskTier(path, MIB)
    tier.close()
    tier = open_tier(path)
    assert load(tier, 2) == content(2, PAGE)
    tier.close()


def test_does_not_use_recreated_directory_of_another_tier(path):
    tier = open_tier(path)
    shutil.rmtree(path)
    with pytest.raises(TierUnavailableError):
        store(tier, 1)
    other = DiskTier(path, MIB)
    assert not tier.health.probe()
    other.close()
    assert tier.health.probe()
    tier.close()


def test_uses_remounted_volume_but_not_the_mount_point(volume, small):
    store(small, 1)
    subprocess.run(["mount", "-o", "remount,ro", volume], check=True)
    subprocess.run(["umount", "-l", volume], check=True)
    with pytest.raises(TierUnavailableError):
        store(small, 2)
    assert not small.health.probe()
    assert list(volume.iterdir()) == []
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", volume], check=True)
    assert not small.health.probe()  # too small
    subprocess.run(["umount", volume], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", volume], check=True)
    assert small.health.probe()
    assert small.indexed.wait(60)
    assert store(small, 2)
    assert small.used_bytes == taken_bytes(volume)
