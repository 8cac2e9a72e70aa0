"""Evictors: the contract of the LMCache 0.1-0.3 API, with exact byte counts."""

from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache.storage_backend.evictor import DummyEvictor, LRUEvictor, PutStatus
from lmcache.storage_backend.mem_pool import KVObj
from lmcache.utils import DiskCacheMetadata

STEPS = st.tuples(
    st.sampled_from(["put", "get", "remove", "fail"]),
    st.sampled_from("abcdef"),
    st.sampled_from([20, 40, 60, 100, 101]),
)


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


def test_dummy_evictor_evicts_nothing():
    chunks = OrderedDict(a=b"1", b=b"2")
    DummyEvictor().update_on_get("a", chunks)
    assert DummyEvictor().update_on_put(chunks, 1 << 60) == ([], PutStatus.LEGAL)
    assert list(chunks) == ["a", "b"]


@pytest.mark.parametrize(("gigabytes", "capacity_bytes"), [(None, 10 << 30), (5, 5 << 30), (0.5, 1 << 29)])
def test_capacity_is_in_gib(gigabytes, capacity_bytes):
    evictor = LRUEvictor() if gigabytes is None else LRUEvictor(gigabytes)
    assert (evictor.MAX_CACHE_SIZE, evictor.current_cache_size) == (capacity_bytes, 0)


@given(st.lists(STEPS))
def test_defect_13_evicts_the_least_recently_used_as_far_as_needed(steps):
    """Overwritten and removed chunks, and puts that fail, count exactly."""
    evictor, chunks = LRUEvictor(), OrderedDict()
    evictor.MAX_CACHE_SIZE = 100
    for step, key, size in steps:
        if step == "get" and key in chunks:
            evictor.update_on_get(key, chunks)
            assert next(reversed(chunks)) == key
        elif step == "remove":
            chunks.pop(key, None)
        elif step in ("put", "fail"):
            num_bytes = sum(map(len, chunks.values()))
            victims, status = evictor.update_on_put(chunks, size)
            assert status is (PutStatus.LEGAL if size <= 100 else PutStatus.ILLEGAL)
            assert victims == list(chunks)[: len(victims)]
            freed = [len(chunks.pop(victim)) for victim in victims]
            if size <= 100:
                assert num_bytes - sum(freed) + size <= 100
                assert not freed or num_bytes - sum(freed[:-1]) + size > 100
                assert evictor.current_cache_size == num_bytes - sum(freed) + size
            else:
                assert not freed
            if step == "put" and size <= 100:
                chunks.pop(key, None)
                chunks[key] = bytearray(size)
