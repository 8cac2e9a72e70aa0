import threading

import pytest
import torch

from lmcache.storage_backend import queued_backend
from lmcache.storage_backend.local_backend import LMCLocalBackend
from lmcache.storage_backend.tensors import OutputPool
from testing.child_process import wait_until
from tests.harness.library.kv_cache import make_chunk, make_config, make_key, make_pool
from tests.harness.loops import in_threads

CHUNK_BYTES = make_chunk().nbytes


def make_backend(**options) -> LMCLocalBackend:
    return LMCLocalBackend(make_config(), make_pool(**options), "cpu")


@pytest.fixture
def backend():
    backend = make_backend()
    yield backend
    backend.close()


@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.complex128, torch.float32, torch.float64, torch.int32, torch.bool]
)
def test_defect_05_stores_chunks_of_any_dtype(backend, dtype):
    chunk = make_chunk(2).to(dtype) * (1 if dtype == torch.bool else 1000)
    if dtype.is_floating_point:
        chunk *= 1e30  # the cache has dtype float16
    backend.put(make_key("a"), chunk)
    assert torch.equal(backend.get(make_key("a")), chunk)


def test_each_field_of_a_key_counts(backend):
    backend.put(make_key("a"), make_chunk())
    for change in (
        {"fmt": "x"},
        {"model_name": "x"},
        {"world_size": 2},
        {"worker_id": 1},
        {"chunk_hash": "x"},
    ):
        other = type(make_key("a"))(**{**vars(make_key("a")), **change})
        assert not backend.contains(other)


def test_defect_03_large_results_share_no_memory_while_in_use():
    backend = make_backend(shape=(1, 2, 4096, 4, 64))
    for seed in (1, 2):
        backend.put(make_key(str(seed)), torch.full((1, 2, 4096, 4, 64), seed, dtype=torch.float16))
    whole = backend.get(make_key("1"))
    assert whole is not None
    part = whole[0, 1, 5]  # the view keeps its memory in use
    del whole
    results = [backend.get(make_key("2")) for _ in range(6)]
    assert (part == 1).all()
    addresses = {result.data_ptr() for result in results}
    assert len(addresses) == 6
    del results
    assert backend.get(make_key("2")).data_ptr() in addresses, "unused memory is reused"
    backend.close()


def test_output_pool_retains_at_most_an_eighth_of_the_cache():
    pool, size = OutputPool(max_cache_gb=1 / 4), 34 << 20  # the pool may retain 32 MiB
    for _ in range(6):
        pool.empty([size], torch.uint8)
    assert pool.num_bytes == 0
    results = [pool.empty([12 << 20], torch.uint8) for _ in range(6)]
    results.clear()
    assert pool.num_bytes == 24 << 20
    result = pool.empty([12 << 20], torch.uint8)
    pool.close()
    assert pool.num_bytes == 0
    del result
    assert pool.num_bytes == 0, "a closed pool retains no memory"


def test_output_pool_is_safe_for_threads():
    pool = OutputPool(max_cache_gb=1)

    def use(seed):
        for number in range(100):
            result = pool.empty([(1 + (number * seed) % 5) << 20], torch.uint8)
            result[::4096] = seed
            assert (result[::4096] == seed).all()

    in_threads(use, range(1, 5))
    assert pool.num_bytes <= 128 << 20


def test_chunk_larger_than_a_full_chunk_is_dropped_and_counted():
    # A full chunk of 64 KiB uses a whole frame, so a larger chunk does not fit.
    shape = (1, 2, 128, 2, 64)
    backend = make_backend(shape=shape)
    backend.put(make_key("a"), torch.ones(shape, dtype=torch.float32))
    assert not backend.contains(make_key("a"))
    assert backend.num_faults == 1
    backend.put(make_key("a"), torch.ones(shape, dtype=torch.float16))
    assert backend.contains(make_key("a"))
    backend.close()


# ---- eviction ----


def test_dict_is_a_live_view(backend):
    view = backend.dict
    assert len(view) == 0
    backend.put(make_key("a"), make_chunk())
    assert list(view) == [make_key("a")]
    assert make_key("a") in view
    assert "a" not in view
    assert torch.equal(view[make_key("a")], make_chunk())
    with pytest.raises(KeyError):
        view[make_key("b")]


# ---- puts in the background ----


def test_full_queue_blocks_puts(monkeypatch, backend):
    monkeypatch.setattr(queued_backend, "MAX_QUEUED_BYTES", 2 * CHUNK_BYTES)
    gate, put = threading.Event(), backend._put
    monkeypatch.setattr(backend, "_put", lambda *arguments: gate.wait(60) and put(*arguments))
    done = []

    def put_all():
        for index in range(6):
            backend.put_nonblocking(make_key(str(index)), make_chunk())
            done.append(index)

    thread = threading.Thread(target=put_all)
    thread.start()
    wait_until(lambda: len(done) == 2)
    assert backend._puts._num_bytes == 2 * CHUNK_BYTES
    gate.set()
    thread.join()
    wait_until(lambda: len(backend.dict) == 6)
    assert backend.num_faults == 0


def test_put_replaces_an_older_one_that_is_still_queued(monkeypatch, backend):
    gate, put = threading.Event(), backend._put
    monkeypatch.setattr(
        backend, "_put", lambda key, *rest: (key != make_key("a") or gate.wait(60)) and put(key, *rest)
    )
    older, newer = make_chunk(seed=1), make_chunk(seed=2)
    for name in "ab":
        backend.put(make_key(name), older, blocking=False)
    backend.put(make_key("b"), newer)
    gate.set()
    backend.put(make_key("last"), older, blocking=False)
    wait_until(lambda: backend.contains(make_key("last")))
    assert torch.equal(backend.get(make_key("b")), newer)


def test_defect_11_failed_and_unused_backends_leave_no_threads():
    before = threading.active_count()
    with pytest.raises(RuntimeError):
        LMCLocalBackend(make_config(), make_pool(), "no such device")
    backend = make_backend()
    backend.put(make_key("a"), make_chunk())
    assert threading.active_count() == before
    backend.close()
    backend.put_worker()  # returns at once, because it has no work


def test_chunk_is_dropped_if_the_worker_cannot_start(backend, monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        backend.put(make_key("a"), make_chunk(), blocking=False)
    assert backend.num_faults == 1
    backend.put(make_key("b"), make_chunk(), blocking=False)
    wait_until(lambda: backend.contains(make_key("b")))
