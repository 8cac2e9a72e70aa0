"""Keys of the engine: the documented hash chain of tokens."""

import hashlib

import pytest
import torch

from tests.harness.dict_engine import make_engine
from tests.harness.kv_cache import CHUNK, cut, is_same, make_kv, make_tokens


@pytest.fixture
def engine(fmt):
    return make_engine(fmt)


def golden_hashes(tokens: list[int]) -> list[str]:
    """Hash chain of the LMCache 0.1-0.3 API, written independently."""
    hashes, before = [], ""
    for start in range(0, len(tokens), CHUNK):
        raw = b"".join(token.to_bytes(8, "little") for token in tokens[start : start + CHUNK])
        before = hashlib.sha256(before.encode("ascii") + raw).hexdigest()
        hashes.append(before)
    return hashes


def test_defect_25_keys_match_the_documented_bytes(engine, fmt):
    tokens = torch.arange(1, 2 * CHUNK + 6)
    expected = golden_hashes(tokens.tolist())
    assert expected[0] == "cb7884f2e00d29beca56adc39ba7d0ad0d3ca9e46e461ef2aeac4e56c872ad5f"
    assert engine._prefix_hash(engine._chunk_tokens(tokens)) == expected
    assert engine._prefix_hash(engine._chunk_tokens(tokens), 2) == expected[2:]
    assert engine._hash(tokens[:CHUNK], engine._get_init_hash()) == expected[0]
    engine.store(tokens, make_kv(len(tokens), fmt))
    assert [key.to_string() for key in engine.engine_.chunks] == [
        f"{fmt}@org/model@1@0@{h}" for h in expected
    ]


def test_defect_22_keys_do_not_depend_on_the_integer_type(engine, fmt):
    tokens = make_tokens(40) % 100
    engine.store(tokens.to(torch.int32), make_kv(40, fmt))
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        assert engine.lookup(tokens.to(dtype)) == 40
    assert engine.lookup(tokens.repeat_interleave(2)[::2]) == 40  # a view with strides


def test_documented_helpers_agree_with_the_engine(engine, fmt):
    tokens, kv = make_tokens(40), make_kv(40, fmt)
    blob = engine._tuple_kv_to_blob(kv)
    assert is_same(engine._blob_to_tuple_kv(blob), kv)
    assert engine._num_tokens_in_kv(kv, fmt) == 40
    all_chunks = list(engine._make_chunks(tokens, blob, fmt, skip_existing=False))
    assert [chunk_hash for chunk_hash, _ in all_chunks] == golden_hashes(tokens.tolist())
    engine.store(tokens[:CHUNK], cut(kv, fmt, 0, CHUNK))
    missing = list(engine._make_chunks(tokens, blob, fmt))
    assert [chunk_hash for chunk_hash, _ in missing] == golden_hashes(tokens.tolist())[1:]
    for chunk_hash, chunk in (*all_chunks, *missing):
        assert chunk.is_contiguous()
        engine.engine_.put(engine._make_key(chunk_hash, fmt), chunk)
    assert is_same(engine.retrieve(tokens)[0], kv)
    assert not list(engine._make_chunks(tokens, blob, fmt))
    with pytest.raises(ValueError, match="Invalid format: odd"):
        engine._slice_kv_at(0, blob, "odd")
    with pytest.raises(AssertionError):
        engine._make_chunks(tokens, blob, fmt, 1, skip_existing=False)
