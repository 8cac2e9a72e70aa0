"""The library's engine with GPU tensors and chunks on the host or the GPU. Needs a GPU: `make gpu-check`."""

import threading

import pytest
import torch

from lmcache.cache_engine import LMCacheEngine
from testing.child_process import wait_until
from tests.harness.library.kv_cache import (
    CHUNK,
    FORMATS,
    cut,
    is_same,
    make_config,
    make_kv,
    make_metadata,
    make_tokens,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]


@pytest.fixture(params=["cpu", "cuda", "disk"])
def device(request, tmp_path):
    return str(tmp_path) if request.param == "disk" else request.param


def on_gpu(kv):
    return tuple((k.cuda(), v.cuda()) for k, v in kv)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("blocking", [True, False])
def test_stored_chunks_are_retrieved_on_the_gpu(device, fmt, blocking):
    engine = LMCacheEngine(make_config(device), make_metadata(fmt))
    tokens, kv = make_tokens(5 * CHUNK + 3).cuda(), on_gpu(make_kv(5 * CHUNK + 3, fmt))
    expected = tuple((k.clone(), v.clone()) for k, v in kv)
    engine.store(tokens, kv, blocking=blocking)
    for k, v in kv:  # the caller may change its tensors at once
        k.zero_()
        v.zero_()
    wait_until(lambda: engine.lookup(tokens) == len(tokens))
    retrieved, is_retrieved = engine.retrieve(tokens, torch.arange(len(tokens), device="cuda") >= 5)
    assert is_retrieved.is_cuda
    assert retrieved[0][0].is_cuda
    assert is_same(retrieved, cut(expected, fmt, 5))
    engine.close()


def test_threads_on_different_streams_retrieve_right_bytes(device):
    """Chunks evict each other: neither reuse nor reads may overtake a copy on another stream."""
    config = make_config(device, max_local_cache_size=16 * 16384 / 1024**3)
    engine = LMCacheEngine(config, make_metadata())
    prompts = [(make_tokens(4 * CHUNK, seed), on_gpu(make_kv(4 * CHUNK, seed=seed))) for seed in range(8)]
    wrong = []

    def use(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in range(100):
                tokens, kv = prompts[(step * 5 + seed) % 8]
                engine.store(tokens, kv, blocking=bool(step % 2))
                retrieved, is_retrieved = engine.retrieve(tokens)
                if retrieved != () and not is_same(retrieved, cut(kv, "vllm", 0, int(is_retrieved.sum()))):
                    wrong.append((seed, step))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.close()
    assert not wrong
