"""Checks of the arena's capacity against the volume, the memory limit and the available memory."""

import os

import pytest

from lmcache_store.tiers.errors import ArenaError
from lmcache_store.tiers.memory.arena import ArenaFile
from lmcache_store.tiers.memory.capacity import (
    available_memory,
    check_available,
    check_capacity,
    memory_limit,
)

MIB = 1 << 20


def write_cgroup_files(folder, membership, files):
    """Write the files in which the kernel describes a process's control groups."""
    (folder / "cgroup").write_text(membership)
    for name, text in files.items():
        file = folder / "fs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def used(limit, num_bytes, folder=""):
    """Return the files of a control group."""
    return {f"{folder}memory.max": f"{limit}\n", f"{folder}memory.current": f"{num_bytes}\n"}


STAT = "anon 5\ninactive_file 30\nactive_file 7\nshmem 800\nfile 837\n"
VERSION_1 = {
    "memory/x/memory.limit_in_bytes": "700",
    "memory/x/memory.usage_in_bytes": "800",
    "memory/x/memory.stat": "inactive_file 1\ntotal_inactive_file 20\n",
}


class TestCapacityChecks:
    def test_error_names_missing_bytes_and_volume(self, path):
        with pytest.raises(ArenaError, match=rf"{path} needs 1024Ti more, its volume has"):
            ArenaFile(path, 1 << 50)
        assert not path.exists()

    def test_bytes_already_in_the_file_count_as_available(self, path, monkeypatch):
        monkeypatch.setattr("lmcache_store.tiers.memory.capacity.memory_limit", lambda: None)
        volume = os.statvfs(path.parent)
        too_much = volume.f_bavail * volume.f_frsize + (1 << 34)
        with pytest.raises(ArenaError, match="volume"):
            check_capacity(path, too_much)
        check_capacity(path, too_much, 1 << 35)

    def test_error_names_the_memory_limit(self, path, monkeypatch):
        monkeypatch.setattr("lmcache_store.tiers.memory.capacity.memory_limit", lambda: 100 * MIB)
        with pytest.raises(ArenaError, match=r"memory limit of this container is 100Mi"):
            check_capacity(path, 90 * MIB)
        check_capacity(path, 30 * MIB)

    @pytest.mark.parametrize(
        ("membership", "files", "limit"),
        [
            ("0::/\n", {"memory.max": "1000\n"}, 1000),
            ("0::/\n", {"memory.max": "max\n"}, None),
            ("0::/a/b\n", {"a/memory.max": "500\n", "a/b/memory.max": "max\n", "memory.max": "800"}, 500),
            ("0::/host/pod\n", {"memory.max": "800"}, 800),
            ("4:cpu,memory:/x\n", {"memory/x/memory.limit_in_bytes": "700"}, 700),
            ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
            ("", {}, None),
        ],
    )
    def test_memory_limit_follows_cgroups(self, tmp_path, membership, files, limit):
        write_cgroup_files(tmp_path, membership, files)
        assert memory_limit(tmp_path / "fs", tmp_path / "cgroup") == limit

    @pytest.mark.parametrize(
        ("membership", "files", "available_bytes"),
        [
            pytest.param("0::/\n", used(1000, 400), 600, id="a limit"),
            pytest.param("0::/\n", used("max", 400), None, id="no limit"),
            pytest.param("0::/a/b\n", used(500, 450, "a/") | used(400, 50, "a/b/"), 50, id="of the parent"),
            pytest.param("0::/\n", used(1000, 900) | {"memory.stat": STAT}, 137, id="files are reclaimed"),
            pytest.param("4:memory:/x\n", VERSION_1, -80, id="version 1"),
            pytest.param("", {}, None, id="no group"),
        ],
    )
    def test_available_memory_follows_cgroups(self, tmp_path, membership, files, available_bytes):
        write_cgroup_files(tmp_path, membership, files)
        assert available_memory(tmp_path / "fs", tmp_path / "cgroup") == available_bytes

    def test_refuses_growth_into_the_memory_reserve(self, monkeypatch):
        monkeypatch.setattr("lmcache_store.tiers.memory.capacity.available_memory", lambda: 100 * MIB)
        check_available(36 * MIB)
        with pytest.raises(ArenaError, match="leaves 100Mi, of which 64Mi must stay free"):
            check_available(37 * MIB)
