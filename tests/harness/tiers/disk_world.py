"""A directory for disk tiers, with opened tiers, objects and faults."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from lmcache_store.tiers.base import ObjectId, StoredId
from lmcache_store.tiers.circuit import Circuit
from lmcache_store.tiers.disk import file_formats as disk_formats
from lmcache_store.tiers.disk import files as disk_files
from lmcache_store.tiers.disk import tier as disk_tier
from lmcache_store.tiers.disk.files import path_of
from lmcache_store.tiers.disk.tier import DiskTier
from lmcache_store.tiers.encryption.pieces import stored_key

PAGE = 4096
MIB = 1 << 20


def key_of(number: int) -> bytes:
    return bytes(32) + number.to_bytes(1, "big") * 32


def content(number: int, size: int) -> bytes:
    """Bytes that no other object has and that differ from page to page."""
    return (bytes([number]) + bytes(range(251)) * (size // 251 + 1))[:size]


def open_tier(path: Path, capacity: int = MIB) -> DiskTier:
    """Open a tier and wait for its index."""
    tier = DiskTier(path, capacity)
    assert tier.indexed.wait(60)
    return tier


def store(tier: DiskTier, number: int, size: int = PAGE, column: int = 0) -> bool:
    return tier.store(ObjectId(key_of(number), column), memoryview(content(number, size)), b"label")


def load(tier: DiskTier, number: int, room: int = 16 * PAGE, column: int = 0) -> bytes | None:
    into = memoryview(bytearray(room))
    loaded = tier.load(ObjectId(key_of(number), column), into)
    return None if loaded is None else bytes(into[: loaded.length])


def file_of(path: Path, number: int, column: int = 0, *, is_encrypted: bool = False) -> Path:
    key = stored_key(key_of(number)) if is_encrypted else key_of(number)
    return path / path_of(StoredId(ObjectId(key, column)))


def taken_bytes(path: Path) -> int:
    """Bytes that the files use on the volume, from the file system."""
    return sum(file.lstat().st_blocks * 512 for file in path.rglob("*") if file.is_file())


def temporaries(path: Path) -> list[Path]:
    return list(path.rglob("*.tmp"))


class _Os:
    """The module ``os`` with one failing function."""

    def __init__(self, function: str, error: int) -> None:
        self._function = function
        self._error = error

    def __getattr__(self, name: str) -> object:
        return self._fail if name == self._function else getattr(os, name)

    def _fail(self, *_: object, **__: object) -> None:
        raise OSError(self._error, os.strerror(self._error))


@contextmanager
def failing(function: str, error: int) -> Iterator[None]:
    """Let a call to the operating system fail in the disk tier only."""
    broken = _Os(function, error)
    with mock.patch.object(disk_files, "os", broken), mock.patch.object(disk_formats, "os", broken):
        yield


@pytest.fixture(autouse=True)
def patient_stores(monkeypatch):
    """Let stores wait a minute for the index of a new tier. After a second, they would be refused."""
    monkeypatch.setattr(disk_tier, "_MAX_WAIT_SECONDS", 60.0)


@pytest.fixture
def no_prober(monkeypatch):
    """Let tiers probe only when a test asks. A prober that runs late writes its page between two steps."""
    monkeypatch.setattr(Circuit, "_keep_probing", lambda _: None)


@pytest.fixture
def volume(tmp_path):
    """A volume of 1 MiB."""
    mounted = tmp_path / "volume"
    mounted.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mounted], check=False).returncode:
        pytest.skip("mounting a volume needs root")
    yield mounted
    subprocess.run(["umount", "-l", mounted], check=True)
