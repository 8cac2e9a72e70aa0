"""Evictors: the contract of the LMCache 0.1-0.3 API, with exact byte counts."""

from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache.storage_backend.evictor import BaseEvictor, DummyEvictor, LRUEvictor, PutStatus
from lmcache.storage_backend.mem_pool import KVObj
from lmcache.utils import DiskCacheMetadata

STEPS = ["put", "get", "remove", "fail"]


@pytest.fixture
def evictor():
    """An evictor with a capacity of 100 bytes."""
    evictor = LRUEvictor()
    evictor.MAX_CACHE_SIZE = 100
    return evictor


def put(evictor, chunks, key, size):
    """Put a chunk as a backend does. Return False if the evictor refuses it."""
    victims, status = evictor.update_on_put(chunks, size)
    for victim in victims:
        chunks.pop(victim)
    if status == PutStatus.LEGAL:
        chunks.pop(key, None)
        chunks[key] = bytearray(size)
    return status == PutStatus.LEGAL


def num_bytes(chunks):
    return sum(map(len, chunks.values()))


def test_statuses_have_the_documented_values():
    assert [status.value for status in (PutStatus.LEGAL, PutStatus.ILLEGAL)] == [1, 2]


@pytest.mark.parametrize(
    "kv_obj",
    [
        torch.zeros(6, dtype=torch.float16),
        bytearray(12),
        KVObj(0, 12, torch.zeros(1)),
        DiskCacheMetadata("/x", 12),
    ],
)
def test_get_size_returns_bytes(kv_obj):
    assert DummyEvictor().get_size(kv_obj) == 12


def test_defect_17_get_size_accepts_bytes():
    assert DummyEvictor().get_size(b"12 bytes now") == 12


def test_get_size_refuses_unknown_types():
    with pytest.raises(Exception, match="Encountered unknown kv data type <class 'list'>!"):
        DummyEvictor().get_size([])


def test_base_evictor_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        BaseEvictor()


def test_dummy_evictor_evicts_nothing():
    chunks = OrderedDict(a=b"1", b=b"2")
    DummyEvictor().update_on_get("a", chunks)
    assert DummyEvictor().update_on_put(chunks, 1 << 60) == ([], PutStatus.LEGAL)
    assert list(chunks) == ["a", "b"]


@pytest.mark.parametrize(("gigabytes", "capacity_bytes"), [(None, 10 << 30), (5, 5 << 30), (0.5, 1 << 29)])
def test_capacity_is_in_gib(gigabytes, capacity_bytes):
    evictor = LRUEvictor() if gigabytes is None else LRUEvictor(gigabytes)
    assert (evictor.MAX_CACHE_SIZE, evictor.current_cache_size) == (capacity_bytes, 0)


def test_evicts_the_least_recently_used_first(evictor):
    chunks = OrderedDict()
    for key in "abcd":
        assert put(evictor, chunks, key, 25)
    evictor.update_on_get("a", chunks)
    assert evictor.update_on_put(chunks, 30) == (["b", "c"], PutStatus.LEGAL)
    assert list(chunks) == ["b", "c", "d", "a"]  # the caller removes the victims


def test_refuses_chunk_larger_than_capacity_without_eviction(evictor):
    chunks = OrderedDict()
    put(evictor, chunks, "a", 25)
    assert evictor.update_on_put(chunks, 101) == ([], PutStatus.ILLEGAL)
    assert evictor.current_cache_size == 25


def test_defect_13_overwritten_chunk_counts_once(evictor):
    chunks = OrderedDict()
    for _ in range(50):
        assert put(evictor, chunks, "a", 40)
        assert put(evictor, chunks, "b", 40)
    assert set(chunks) == {"a", "b"}


def test_defect_13_removed_chunk_does_not_count(evictor):
    chunks = OrderedDict()
    put(evictor, chunks, "a", 60)
    chunks.pop("a")
    put(evictor, chunks, "b", 40)
    assert put(evictor, chunks, "c", 60)
    assert list(chunks) == ["b", "c"]


def test_defect_13_failed_put_does_not_count(evictor):
    chunks = OrderedDict()
    evictor.update_on_put(chunks, 90)  # afterwards the copy raised
    put(evictor, chunks, "b", 90)
    assert put(evictor, chunks, "c", 10)
    assert list(chunks) == ["b", "c"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "get", "remove", "fail"]), st.sampled_from("abcdef"), st.integers(0, 120)
        )
    )
)
def test_sizes_are_exact_after_any_calls(steps):
    evictor, chunks = LRUEvictor(), OrderedDict()
    evictor.MAX_CACHE_SIZE = 100
    for step, key, size in steps:
        if step == "put":
            was_present = key in chunks
            assert put(evictor, chunks, key, size) == (size <= 100)
            if size <= 100 and not was_present:
                assert evictor.current_cache_size == num_bytes(chunks)
        elif step == "get" and key in chunks:
            evictor.update_on_get(key, chunks)
            assert next(reversed(chunks)) == key
        elif step == "remove":
            chunks.pop(key, None)
        elif step == "fail":
            for victim in evictor.update_on_put(chunks, size)[0]:
                del chunks[victim]
        assert num_bytes(chunks) <= 100
