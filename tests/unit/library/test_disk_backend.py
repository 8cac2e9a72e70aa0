import contextlib
import errno
import os
import threading

import pytest
import torch
from safetensors.torch import load_file

from lmcache.storage_backend.local_backend import LMCLocalDiskBackend, save_disk
from lmcache_store.tiers.base import ObjectId
from testing.child_process import wait_until
from tests.harness.library.kv_cache import CHUNK, make_chunk, make_config, make_key, make_pool


@pytest.fixture
def open_backend(tmp_path):
    """Open backends on one directory, and close them at teardown."""
    with contextlib.ExitStack() as stack:

        def make(*arguments, **options):
            pool = make_pool(*arguments, **options)
            backend = LMCLocalDiskBackend(make_config(str(tmp_path)), pool, "cpu")
            return stack.enter_context(contextlib.closing(backend))

        yield make


@pytest.fixture
def backend(open_backend):
    return open_backend()


def files(directory) -> list:
    """Return the files that hold chunks: files of more than 1000 bytes."""
    return [path for path in directory.rglob("*") if path.is_file() and path.stat().st_size > 1000]


def test_defect_16_finds_chunks_after_a_restart(open_backend):
    backend = open_backend()
    backend.put(make_key("a"), make_chunk(seed=1))
    backend.put(make_key("b"), make_chunk(5, seed=2), blocking=False)
    backend.close()
    backend = open_backend()
    assert backend.contains(make_key("a"))
    assert torch.equal(backend.get(make_key("a")), make_chunk(seed=1))
    assert torch.equal(backend.get(make_key("b")), make_chunk(5, seed=2))
    wait_until(lambda: backend.evictor.current_cache_size > 0)


def test_engines_sharing_a_directory_do_not_share_chunks(open_backend):
    backends = [open_backend() for _ in range(3)]
    for index, backend in enumerate(backends):
        backend.put(make_key("a"), make_chunk(seed=index))
    for index, backend in enumerate(backends):
        assert torch.equal(backend.get(make_key("a")), make_chunk(seed=index))
        backend.close()
    backend = open_backend()
    assert torch.equal(backend.get(make_key("a")), make_chunk(seed=0))


def test_chunks_of_another_dtype_are_misses(open_backend):
    backend = open_backend()
    backend.put(make_key("a"), make_chunk())
    backend.close()
    backend = open_backend(dtype=torch.bfloat16)
    assert backend.get(make_key("a")) is None


def flip(file) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [flip, os.unlink])
def test_defect_08_damaged_or_deleted_file_is_a_miss(tmp_path, backend, damage):
    backend.put(make_key("a"), make_chunk())
    (file,) = files(tmp_path)
    damage(file)
    assert backend.get(make_key("a")) is None
    backend.put(make_key("a"), make_chunk(seed=1))
    assert torch.equal(backend.get(make_key("a")), make_chunk(seed=1))


def test_foreign_files_are_not_changed(tmp_path, open_backend):
    legacy = tmp_path / "vllm@org-model@1@0@a.pt"
    save_disk(str(legacy), make_chunk())
    (tmp_path / "notes.txt").write_text("foreign")
    backend = open_backend()
    assert not backend.contains(make_key("a"))
    backend.put(make_key("a"), make_chunk(seed=1))
    assert torch.equal(backend.get(make_key("a")), make_chunk(seed=1))
    backend.close()
    assert torch.equal(load_file(legacy)["kv_chunk"], make_chunk())
    assert (tmp_path / "notes.txt").read_text() == "foreign"


@pytest.mark.parametrize("num_tokens", [3, CHUNK])
def test_unreadable_chunk_is_deleted_by_a_read(backend, num_tokens):
    """The file may be of another version.

    While it counted as present, no client would put the chunk again.
    """
    chunk = make_chunk(num_tokens, seed=1)
    payload = bytearray(chunk.nbytes) + b"float16 4 2 3 2 32".ljust(128)
    assert backend._tier.store(ObjectId(backend._names(make_key("a")), 0), memoryview(payload))
    assert backend.contains(make_key("a"))
    assert backend.get(make_key("a")) is None
    assert not backend.contains(make_key("a"))
    backend.put(make_key("a"), chunk)
    assert torch.equal(backend.get(make_key("a")), chunk)


@pytest.mark.parametrize("change", ["put", "remove"])
def test_undeletable_file_counts_a_single_fault(backend, monkeypatch, change):
    """A store keeps an existing file. After a failed removal, reads would return the old chunk."""

    def refuse(*_, **__):
        raise PermissionError(errno.EPERM, "immutable")

    backend.put(make_key("a"), make_chunk(seed=1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        getattr(backend, change)(make_key("a"), *[make_chunk(seed=2)] * (change == "put"))
    assert backend.num_faults == 1
    wait_until(lambda: backend.contains(make_key("a")))


def test_save_disk_replaces_the_file_atomically(tmp_path):
    path = tmp_path / "chunk.pt"
    save_disk(str(path), make_chunk(seed=1).transpose(0, 3))
    with pytest.raises(NotImplementedError):
        save_disk(str(path), make_chunk().to("meta"))
    assert torch.equal(load_file(path)["kv_chunk"], make_chunk(seed=1).transpose(0, 3))
    assert [file.name for file in tmp_path.iterdir()] == ["chunk.pt"]


def test_directory_stays_within_its_limit(tmp_path, open_backend):
    shape = (1, 2, 1024, 32, 64)  # 8 MiB
    backend = open_backend((3 << 23) / make_chunk().nbytes, shape)
    assert backend.evictor.MAX_CACHE_SIZE == 3 << 23
    backend._tier.indexed.wait(60)
    for index in range(7):
        backend.put(make_key(str(index)), torch.zeros(shape, dtype=torch.float16))
    assert [key.chunk_hash for key in backend.dict] == ["4", "5", "6"]
    assert len(files(tmp_path)) == 3
    assert 3 << 23 <= backend.evictor.current_cache_size <= (3 << 23) + 3 * 8192
    assert backend.contains(make_key("4"))
    assert not backend.contains(make_key("3"))


def test_chunk_larger_than_a_full_chunk_is_dropped_and_counted(backend):
    backend.put(make_key("a"), make_chunk(dtype=torch.float32))
    assert not backend.contains(make_key("a"))
    assert backend.num_faults == 1


def test_removed_keys_are_forgotten(backend, monkeypatch):
    monkeypatch.setattr("lmcache.storage_backend.local_disk_backend._MIN_KNOWN_KEYS", 10)
    backend._max_known = 10
    for index in range(50):
        backend.put(make_key(str(index)), make_chunk(1))
        backend.remove(make_key(str(index - 3)))
    assert len(backend.dict) == 3
    assert len(backend._known) <= 16


# ---- puts in the background ----


def test_defect_10_completes_more_puts_than_a_pool_holds(backend):
    for index in range(200):
        backend.put(make_key(str(index)), make_chunk(3, seed=index), blocking=False)
    chunk = backend.get(make_key("199"))
    assert chunk is None or torch.equal(chunk, make_chunk(3, seed=199))
    backend.buffer_sweeper()  # returns at once, because it has no work
    wait_until(lambda: backend.contains(make_key("199")))
    for index in range(200):
        assert torch.equal(backend.get(make_key(str(index))), make_chunk(3, seed=index))


def test_defect_10_removes_a_key_before_its_file_is_written(backend):
    for index in range(20):
        backend.put(make_key(str(index)), make_chunk(), blocking=False)
        backend.remove(make_key(str(index)))
    backend.put(make_key("last"), make_chunk(), blocking=False)
    wait_until(lambda: backend.contains(make_key("last")))
    assert not any(backend.contains(make_key(str(index))) for index in range(20))
    assert backend.num_faults == 0


def test_defect_12_unhealthy_disk_misses_and_recovers(backend, monkeypatch):
    backend.put(make_key("a"), make_chunk())
    is_unhealthy, load = threading.Event(), backend._tier.load
    is_unhealthy.set()

    def unhealthy_load(*arguments):
        if is_unhealthy.is_set():
            raise backend._tier.health.failure("EIO")
        return load(*arguments)

    def probe():
        if is_unhealthy.is_set():
            raise OSError("EIO")

    monkeypatch.setattr(backend._tier, "load", unhealthy_load)
    monkeypatch.setattr(backend._tier.health, "_probe", probe)
    assert backend.get(make_key("a")) is None
    assert not backend.contains(make_key("a"))
    backend.put(make_key("b"), make_chunk())
    assert backend.num_faults >= 2
    is_unhealthy.clear()
    wait_until(lambda: backend.contains(make_key("a")))
    assert torch.equal(backend.get(make_key("a")), make_chunk())


def test_refuses_invalid_directories_and_devices():
    pool = make_pool()
    with pytest.raises(ValueError, match="directory"):
        LMCLocalDiskBackend(make_config(None), pool, "cpu")
    before = threading.active_count()
    with pytest.raises(RuntimeError):
        LMCLocalDiskBackend(make_config("/nowhere"), pool, "no such device")
    with pytest.raises(Exception, match="/proc/nowhere"):
        LMCLocalDiskBackend(make_config("/proc/nowhere"), pool, "cpu")
    assert threading.active_count() == before
