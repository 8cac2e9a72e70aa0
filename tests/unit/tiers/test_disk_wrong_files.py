"""A disk tier whose directory has damaged, deleted or foreign files."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.disk.files import Directory
from lmcache_store.tiers.header import HEADER_BYTES
from tests.harness.tiers.disk_restarts import address_of
from tests.harness.tiers.disk_world import PAGE, content, file_of, key_of, load, store, temporaries


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


def flip(position):
    def damage(file):
        raw = bytearray(file.read_bytes())
        raw[position] ^= 1
        file.write_bytes(raw)

    return damage


DAMAGES = {
    "truncated": (lambda file: os.truncate(file, 2 * PAGE), "length"),
    "truncated within a page": (lambda file: os.truncate(file, 2 * PAGE + 1), "length"),
    "empty": (lambda file: os.truncate(file, 0), "length"),
    "too long": (lambda file: os.truncate(file, 100 * PAGE), "length"),
    "a page too long": (lambda file: os.truncate(file, 4 * PAGE), "length"),
    "a flipped bit of the header": (flip(HEADER_BYTES - 1), "header"),
    "a flipped bit of the payload": (flip(3 * PAGE - 1), "checksum"),
    "zeros": (lambda file: file.write_bytes(bytes(3 * PAGE)), "header"),
    "another object": (damage_swap, "name"),
    "a link": (damage_symlink, "type"),
    "a pipe": (damage_pipe, "type"),
}


class TestWrongFiles:
    @pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES)
    @pytest.mark.parametrize("is_aligned", [False, True])
    def test_is_a_miss_and_is_deleted(self, path, tier, damage, reason, is_aligned):
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

    def test_folder_in_place_of_a_file_refuses_the_store(self, path, tier):
        store(tier, 1)
        damage_folder(file_of(path, 1))
        assert load(tier, 1) is None
        assert not store(tier, 1)
        assert tier.stats.refused == {"EISDIR": 1}
        assert not tier.health.is_open
        assert tier.used_bytes == 0
        assert not temporaries(path)

    def test_file_in_place_of_a_folder_refuses_the_store(self, path, tier):
        file_of(path, 1).parent.parent.mkdir()
        file_of(path, 1).parent.touch()
        assert load(tier, 1) is None
        assert not store(tier, 1)
        assert tier.stats.refused == {"ENOTDIR": 1}

    def test_foreign_files_are_not_deleted(self, path, tier, restart):
        store(tier, 1)
        folder = file_of(path, 1).parent
        name = file_of(path, 1).name
        misplaced = folder.parent / "ff" / name
        foreign_files = [
            path / "notes.txt",
            folder / "x.tmp",
            folder / f"{name}.old",
            folder / f"{name}0000000000",
        ]
        foreign_files += [folder / f"{name[:-1]}01", path / "ff" / "aa" / "x.1.tmp", misplaced]
        for file in foreign_files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(bytes(PAGE))
        (folder / name.replace(".0", ".2")).symlink_to(path / "notes.txt")
        tier = restart(2 * PAGE)
        for number in range(2, 12):
            store(tier, number)
        assert tier.used_bytes == 2 * PAGE
        assert all(file.exists() for file in foreign_files)

    def test_start_deletes_temporary_files_of_dead_processes(self, path, tier, restart):
        store(tier, 1)
        (leftover := file_of(path, 1).with_name(f"{file_of(path, 1).name}.12345.tmp")).touch()
        tier = restart()
        assert tier.indexed.wait(60)
        assert not leftover.exists()
        assert load(tier, 1) == content(1, PAGE)

    def test_start_deletes_test_pages_of_dead_processes(self, path, tier, restart, monkeypatch):
        def end(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as during_a_probe, ThreadPoolExecutor() as prober:
            during_a_probe.setattr(Directory, "publish", end)
            with pytest.raises(KeyboardInterrupt):
                prober.submit(tier.health.probe).result()
        assert temporaries(path)
        tier = restart()
        assert tier.indexed.wait(60)
        assert not temporaries(path)
