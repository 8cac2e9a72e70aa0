"""Text form of keys, and other shared helpers."""

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache.utils import CacheEngineKey, _lmcache_nvtx_annotate

TEXT_WITHOUT_AT = st.text().filter(lambda text: "@" not in text)


def test_text_of_a_key_has_the_documented_form():
    key = CacheEngineKey("vllm", "meta-llama/Llama-3.1-8B", 2, 1, "ab12")
    assert key.to_string() == "vllm@meta-llama/Llama-3.1-8B@2@1@ab12"


@given(TEXT_WITHOUT_AT, st.text(), st.integers(), st.integers(), TEXT_WITHOUT_AT)
def test_keys_survive_a_round_trip_through_text(fmt, model, world_size, worker_id, chunk_hash):
    key = CacheEngineKey(fmt, model, world_size, worker_id, chunk_hash)
    assert CacheEngineKey.from_string(key.to_string()) == key


@given(st.text() | st.lists(st.text(max_size=3), max_size=7).map("@".join))
def test_any_text_parses_or_raises_value_error(text):
    with contextlib.suppress(ValueError):
        assert CacheEngineKey.from_string(text).to_string() == text


@pytest.mark.parametrize("text", ["", "a@b@1@0", "vllm@m@one@0@h", "vllm@m@1@ 0@h", "vllm@m@+1@0@h"])
def test_refuses_invalid_key_text(text):
    with pytest.raises(ValueError, match="Invalid key string"):
        CacheEngineKey.from_string(text)


def test_annotated_function_behaves_like_the_original():
    @_lmcache_nvtx_annotate
    def double(number: int) -> int:
        """Double."""
        return 2 * number

    assert double(4) == 8
    assert (double.__name__, double.__doc__) == ("double", "Double.")


def test_annotated_function_opens_an_nvtx_range_if_cuda_is_initialized(monkeypatch):
    ranges = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: ranges.append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: ranges.append("end"))
    assert _lmcache_nvtx_annotate(len)("abc") == 3
    assert ranges == ["lmcache.len", "end"]
