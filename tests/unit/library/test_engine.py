"""The engine over a backend with only the documented methods."""

import hashlib

import pytest
import torch

from lmcache.storage_backend import tensors
from tests.harness.library.dict_engine import make_engine, suffix_mask
from tests.harness.library.kv_cache import (
    CHUNK,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    cut,
    is_same,
    make_kv,
    make_metadata,
    make_tokens,
)
from tests.harness.loops import in_threads


@pytest.fixture
def engine(fmt):
    return make_engine(fmt)


# ---- store and retrieve ----


def test_accepts_a_prompt_without_tokens(engine, fmt):
    engine.store(make_tokens(0), make_kv(0, fmt))
    assert engine.lookup(make_tokens(0)) == 0
    retrieved, mask = engine.retrieve(make_tokens(0))
    assert retrieved == ()
    assert mask.shape == (0,)


def test_caller_may_change_tensors_after_a_store(engine, fmt):
    for blocking in (True, False):
        tokens, kv = make_tokens(40, seed=int(blocking)), make_kv(40, fmt)
        engine.store(tokens, kv, blocking=blocking)
        expected = tuple((k.clone(), v.clone()) for k, v in kv)
        for k, v in kv:
            k.zero_()
            v.zero_()
        assert is_same(engine.retrieve(tokens)[0], expected)


def test_stores_views_and_tensors_with_gradients(engine, fmt):
    tokens, kv = make_tokens(40), make_kv(40, fmt)
    unusual_kv = tuple((k.transpose(0, 2).contiguous().transpose(0, 2).requires_grad_(), v) for k, v in kv)
    engine.store(tokens, unusual_kv)
    retrieved, _ = engine.retrieve(tokens)
    assert is_same(retrieved, kv)
    assert not retrieved[0][0].requires_grad


def test_chunk_unlike_its_key_is_a_miss(engine, fmt):
    tokens, kv = make_tokens(4 * CHUNK), make_kv(4 * CHUNK, fmt)
    engine.store(tokens, kv)
    for invalidate in (lambda chunk: chunk[:, :, :1], lambda chunk: chunk.float(), lambda chunk: chunk[0]):
        key = engine._keys(tokens)[2]
        valid_chunk = engine.engine_.chunks[key]
        engine.engine_.chunks[key] = invalidate(valid_chunk)
        retrieved, mask = engine.retrieve(tokens)
        assert is_same(retrieved, cut(kv, fmt, 0, 2 * CHUNK))
        assert mask.sum() == 2 * CHUNK
        engine.engine_.chunks[key] = valid_chunk


# ---- refusals ----


def test_store_errors_name_the_invalid_argument(engine, fmt):
    tokens, kv = make_tokens(40), make_kv(40, fmt)
    for message, arguments in {
        "Invalid shape of tokens": (tokens[None], kv),
        "Invalid shape of mask": (tokens, kv, torch.ones(1, 40, dtype=torch.bool)),
        "token length does not match mask length": (tokens, kv, torch.ones(39, dtype=torch.bool)),
        "Store KV mask should align to chunk size": (tokens, cut(kv, fmt, 7), suffix_mask(40, 7)),
        "Number of tokens in the kv cache does not match": (tokens, cut(kv, fmt, 1)),
        "the mask must cover all tokens": (tokens, cut(kv, fmt, 16), suffix_mask(40, 16), False),
    }.items():
        with pytest.raises(AssertionError, match=message):
            engine.store(*arguments)
    assert not engine.engine_.chunks


def test_refuses_layers_of_unequal_shape_or_dtype(engine, fmt):
    kv = make_kv(40, fmt)
    with pytest.raises(ValueError, match="same shape and dtype"):
        engine.store(make_tokens(40), (*kv[:-1], (kv[-1][0], kv[-1][1].float())))
    with pytest.raises(ValueError, match="same shape and dtype"):  # copy_ would broadcast to all heads
        engine.store(make_tokens(40), (*kv[:-1], (kv[-1][0], kv[-1][1][..., :1])))


@pytest.mark.parametrize(("dimension", "size"), [(0, LAYERS + 1), (3, HEADS + 1), (4, HEAD_SIZE // 2)])
def test_kv_of_another_geometry_is_neither_stored_nor_retrieved(engine, fmt, dimension, size):
    shape = list(make_metadata().kv_shape)
    shape[dimension] = size
    if fmt == "huggingface":
        shape[2], shape[3] = shape[3], shape[2]
    blob = torch.zeros(shape, dtype=torch.float16)
    tokens = make_tokens(CHUNK)
    with pytest.raises(ValueError, match=r"does not match metadata\.kv_shape"):
        engine.store(tokens, engine._blob_to_tuple_kv(blob))
    engine.engine_.put(engine._keys(tokens)[0], blob)  # another engine wrote the chunk
    assert engine.lookup(tokens) == CHUNK
    retrieved, mask = engine.retrieve(tokens)
    assert retrieved == ()
    assert not mask.any()


def test_refuses_unknown_formats():
    engine = make_engine("other")
    with pytest.raises(ValueError, match="Invalid format: other"):
        engine.store(make_tokens(20), make_kv(20))
    with pytest.raises(ValueError, match="Invalid format: other"):
        engine.retrieve(make_tokens(20))


def test_defect_23_refuses_masks_with_holes_or_wrong_length(engine, fmt):
    tokens, kv = make_tokens(64), make_kv(64, fmt)
    engine.store(tokens, kv)
    hole = torch.ones(64, dtype=torch.bool)
    hole[16:32] = False
    with pytest.raises(ValueError, match="suffix mask"):
        engine.retrieve(tokens, hole)
    with pytest.raises(ValueError, match="suffix mask"):
        engine.store(tokens, cut(kv, fmt, 16), hole)
    with pytest.raises(AssertionError, match="length"):
        engine.retrieve(tokens, hole[1:])


def test_defect_23_retrieved_tensors_allow_in_place_changes(engine, fmt):
    tokens = make_tokens(40)
    with torch.inference_mode():
        engine.store(tokens, make_kv(40, fmt))
        retrieved, mask = engine.retrieve(tokens)
    for tensor in (retrieved[0][0], mask, engine.retrieve(tokens, None, False)[0]):
        assert not tensor.is_inference()
        tensor.zero_()  # an inference tensor would raise here
    assert engine.retrieve(tokens)[0][0][0].any()


# ---- avoided work, and counters ----


def test_defect_24_copies_nothing_if_all_chunks_exist(engine, fmt, monkeypatch):
    tokens, kv = make_tokens(40), make_kv(40, fmt)
    copied: list[int] = []
    copy = tensors.copy

    def count_and_copy(target, source):
        copied.append(source.nbytes)
        copy(target, source)

    monkeypatch.setattr(tensors, "copy", count_and_copy)
    for forbidden in ("stack", "cat"):
        monkeypatch.setattr(torch, forbidden, lambda *_, **__: pytest.fail("a copy of all KV"))
    engine.store(tokens, kv)
    all_bytes = sum(part.nbytes for layer in kv for part in layer)
    assert sum(copied) == all_bytes
    copied.clear()
    engine.store(tokens, kv)
    assert copied == []
    engine.store(tokens[:32], cut(kv, fmt, 0, 32))
    assert copied == []
    engine.retrieve(tokens)
    assert sum(copied) == all_bytes


def test_defect_27_counts_hits_and_misses_in_tokens(engine, fmt):
    tokens, kv = make_tokens(64), make_kv(64, fmt)
    assert engine.hit_rate == 0.0
    engine.store(tokens[:32], cut(kv, fmt, 0, 32))
    engine.retrieve(tokens)
    assert (engine.hit_tokens_count, engine.miss_tokens_count, engine.hit_rate) == (32, 32, 0.5)
    engine.retrieve(make_tokens(64, seed=9))  # a full miss counts, too
    assert (engine.hit_tokens_count, engine.miss_tokens_count, engine.hit_rate) == (32, 96, 0.25)
    engine.retrieve(tokens, suffix_mask(64, 20))  # masked tokens do not count
    assert (engine.hit_tokens_count, engine.miss_tokens_count) == (44, 128)


def test_concurrent_retrieves_count_each_token(engine, fmt):
    tokens = make_tokens(32)
    engine.store(tokens, make_kv(32, fmt))
    in_threads(lambda _: [engine.retrieve(tokens) for _ in range(50)], range(4))
    assert engine.hit_tokens_count == 4 * 50 * 32


# ---- keys: the documented hash chain of tokens ----


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
