"""Keys as text, and what else the library shares."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache.utils import CacheEngineKey, DiskCacheMetadata, _lmcache_nvtx_annotate

NO_AT = st.text().filter(lambda text: "@" not in text)


def test_the_text_of_a_key_is_the_documents():
    key = CacheEngineKey("vllm", "meta-llama/Llama-3.1-8B", 2, 1, "ab12")
    assert key.to_string() == "vllm@meta-llama/Llama-3.1-8B@2@1@ab12"


def test_defect_19_a_model_name_with_an_at_survives():
    key = CacheEngineKey("vllm", "org@host/model@v2", 1, 0, "ab")
    assert CacheEngineKey.from_string(key.to_string()) == key


@given(NO_AT, st.text(), st.integers(), st.integers(), NO_AT)
def test_every_key_survives_its_text(fmt, model, world_size, worker_id, chunk_hash):
    key = CacheEngineKey(fmt, model, world_size, worker_id, chunk_hash)
    assert CacheEngineKey.from_string(key.to_string()) == key


@given(st.text() | st.lists(st.text(max_size=3), max_size=7).map("@".join))
def test_any_text_is_a_key_or_a_documented_error(text):
    try:
        key = CacheEngineKey.from_string(text)
    except ValueError:
        return
    assert key.to_string() == text


@pytest.mark.parametrize("text", ["", "a@b@1@0", "vllm@m@one@0@h", "vllm@m@1@ 0@h", "vllm@m@+1@0@h"])
def test_what_is_no_key_is_refused(text):
    with pytest.raises(ValueError, match="Invalid key string"):
        CacheEngineKey.from_string(text)


def test_keys_are_ordered_hashable_and_match_by_position():
    low, high = CacheEngineKey("vllm", "m", 1, 0, "a"), CacheEngineKey("vllm", "m", 1, 0, "b")
    assert sorted([high, low]) == [low, high]
    assert {low: 1}[CacheEngineKey("vllm", "m", 1, 0, "a")] == 1
    match low:
        case CacheEngineKey(fmt, _, _, _, chunk_hash):
            assert (fmt, chunk_hash) == ("vllm", "a")


def test_disk_metadata_needs_only_path_and_size():
    assert DiskCacheMetadata("/x", 3) == DiskCacheMetadata(path="/x", size=3, shape=None, dtype=None)


def test_an_annotated_function_is_the_function():
    @_lmcache_nvtx_annotate
    def double(number: int) -> int:
        """Twice."""
        return 2 * number

    assert double(4) == 8
    assert (double.__name__, double.__doc__) == ("double", "Twice.")


def test_an_annotated_function_is_a_range_where_cuda_is_in_use(monkeypatch):
    ranges = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: ranges.append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: ranges.append("end"))
    assert _lmcache_nvtx_annotate(len)("abc") == 3
    assert ranges == ["lmcache.len", "end"]
