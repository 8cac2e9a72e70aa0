"""Behaviour of the engine that all backends share."""

import contextlib

import pytest
import torch

from lmcache.cache_engine import LMCacheEngine
from testing.child_process import wait_until
from tests.harness.library.kv_cache import (
    CHUNK,
    cut,
    is_same,
    make_chunk,
    make_config,
    make_kv,
    make_metadata,
    make_tokens,
)


@pytest.fixture
def engine(config, fmt):
    engine = LMCacheEngine(config, make_metadata(fmt))
    yield engine
    engine.close()
    engine.close()  # a second close has no effect


@pytest.mark.parametrize("blocking", [True, False])
def test_defect_21_retrieves_stored_kv_in_both_layouts(engine, fmt, blocking):
    tokens, kv = make_tokens(5 * CHUNK + 3), make_kv(5 * CHUNK + 3, fmt)
    engine.store(tokens, kv, blocking=blocking)
    wait_until(lambda: engine.lookup(tokens) == len(tokens))
    for as_tuple in (True, False):
        retrieved, mask = engine.retrieve(tokens, None, as_tuple)
        assert mask.all()
        assert is_same(tuple((layer[0], layer[1]) for layer in retrieved), kv)


def test_defect_24_does_not_write_existing_chunks_again(engine, fmt):
    tokens, old, new = make_tokens(40), make_kv(40, fmt), make_kv(40, fmt, seed=1)
    engine.store(tokens, old)
    engine.store(tokens, new)
    assert is_same(engine.retrieve(tokens)[0], old)
    engine.store(tokens, new, skip_existing=False)
    assert is_same(engine.retrieve(tokens)[0], new)


def test_defect_03_caller_owns_retrieved_tensors(engine, fmt):
    tokens, kv = make_tokens(CHUNK), make_kv(CHUNK, fmt)
    engine.store(tokens, kv)
    with torch.inference_mode():
        retrieved, _ = engine.retrieve(tokens)
    retrieved[0][0].zero_()
    assert is_same(engine.retrieve(tokens)[0], kv)


def test_defect_05_large_values_are_returned_unchanged_or_missed(engine, fmt):
    """The cache has dtype float16, and the stored float32 values exceed its range."""
    tokens = make_tokens(CHUNK // 2)
    kv = tuple((k * 1e30, v * 1e30) for k, v in make_kv(CHUNK // 2, fmt, dtype=torch.float32))
    engine.store(tokens, kv)
    retrieved, _ = engine.retrieve(tokens)
    assert retrieved == () or is_same(retrieved, kv)


@pytest.fixture
def open_engine():
    """Open engines over memory and close them at teardown."""
    with contextlib.ExitStack() as stack:

        def make(**options):
            engine = LMCacheEngine(make_config("cpu", **options), make_metadata())
            return stack.enter_context(contextlib.closing(engine))

        yield make


def test_uses_local_chunks_while_the_server_is_down(connector, open_engine):
    connector.is_down = True
    engine = open_engine(remote_url="lm://localhost:1", remote_serde="torch")
    tokens, kv = make_tokens(40), make_kv(40)
    engine.store(tokens, kv)
    assert is_same(engine.retrieve(tokens)[0], kv)


def test_evicts_the_tail_of_an_older_prompt_first(open_engine):
    engine = open_engine(max_local_cache_size=3 * make_chunk().nbytes / 1024**3)
    tokens, kv = make_tokens(2 * CHUNK), make_kv(2 * CHUNK)
    engine.store(tokens, kv)
    other, other_kv = make_tokens(2 * CHUNK, seed=1), make_kv(2 * CHUNK, seed=1)
    engine.store(other, other_kv)
    assert engine.lookup(tokens) == CHUNK, "the older prompt lost its tail, not its head"
    assert is_same(engine.retrieve(other)[0], other_kv)


def test_evicts_own_chunks_of_a_prompt_before_shared_chunks(open_engine):
    engine = open_engine(max_local_cache_size=4 * make_chunk().nbytes / 1024**3)
    shared, kv = make_tokens(CHUNK), make_kv(3 * CHUNK)
    first, second = (torch.cat((shared, make_tokens(CHUNK, seed))) for seed in (1, 2))
    engine.store(first, cut(kv, "vllm", 0, 2 * CHUNK))
    engine.store(second, cut(kv, "vllm", 0, 2 * CHUNK))
    engine.store(make_tokens(2 * CHUNK, seed=3), cut(kv, "vllm", 0, 2 * CHUNK))
    assert engine.lookup(first) == CHUNK
    assert engine.lookup(second) == 2 * CHUNK


def test_masked_chunks_count_as_used(open_engine):
    """An engine with a prefix cache masks the head, which must not be evicted before the tail."""
    engine = open_engine()
    tokens, kv = make_tokens(3 * CHUNK), make_kv(3 * CHUNK)
    hashes = [key.chunk_hash for key in engine._keys(tokens)]
    engine.store(tokens, kv)
    for num_masked in (CHUNK + 3, 3 * CHUNK - 1):
        engine.retrieve(tokens, torch.arange(len(tokens)) >= num_masked)
        assert [key.chunk_hash for key in engine.engine_.dict] == hashes[::-1]
    longer = torch.cat((tokens, make_tokens(CHUNK, seed=1)))
    engine.store(longer, make_kv(CHUNK), torch.arange(len(longer)) >= len(tokens))
    assert [key.chunk_hash for key in engine.engine_.dict][1:] == hashes[::-1]
