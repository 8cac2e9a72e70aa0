"""The engine over a backend that has nothing but the documented methods (and once over our own)."""

from __future__ import annotations

import hashlib
import threading

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import lmcache.cache_engine
from lmcache.cache_engine import LMCacheEngine
from lmcache.storage_backend import tensors
from tests.harness.kv_cache import (
    CHUNK,
    FORMATS,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    DictBackend,
    cut,
    is_same,
    make_config,
    make_kv,
    make_metadata,
    make_tokens,
)


def make_engine(fmt: str = "vllm") -> LMCacheEngine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lmcache.cache_engine, "CreateStorageBackend", lambda *_: DictBackend())
        return LMCacheEngine(make_config(), make_metadata(fmt))


def suffix_mask(num_tokens: int, num_masked: int) -> torch.Tensor:
    return torch.arange(num_tokens) >= num_masked


@pytest.fixture(params=FORMATS)
def fmt(request):
    return request.param


@pytest.fixture
def engine(fmt):
    return make_engine(fmt)


# ---- store and retrieve ----


@pytest.mark.parametrize("num_tokens", [1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 3])
def test_what_was_stored_comes_back(engine, fmt, num_tokens):
    tokens, kv = make_tokens(num_tokens), make_kv(num_tokens, fmt)
    engine.store(tokens, kv)
    retrieved, mask = engine.retrieve(tokens)
    assert is_same(retrieved, kv)
    assert mask.dtype == torch.bool
    assert mask.all()
    assert engine.lookup(tokens) == num_tokens


def test_nothing_stored_is_nothing_retrieved(engine):
    for as_tuple in (True, False):
        retrieved, mask = engine.retrieve(make_tokens(40), return_tuple=as_tuple)
        assert retrieved == ()
        assert mask.tolist() == [False] * 40


def test_a_prompt_of_no_tokens_is_nothing(engine, fmt):
    engine.store(make_tokens(0), make_kv(0, fmt))
    assert engine.lookup(make_tokens(0)) == 0
    retrieved, mask = engine.retrieve(make_tokens(0))
    assert retrieved == ()
    assert mask.shape == (0,)


def test_the_common_prefix_is_retrieved(engine, fmt):
    tokens, kv = make_tokens(5 * CHUNK), make_kv(5 * CHUNK, fmt)
    engine.store(tokens, kv)
    other = torch.cat((tokens[: 2 * CHUNK + 5], make_tokens(50, seed=1)))
    retrieved, mask = engine.retrieve(other)
    assert is_same(retrieved, cut(kv, fmt, 0, 2 * CHUNK))
    assert mask.tolist() == [True] * (2 * CHUNK) + [False] * (len(other) - 2 * CHUNK)
    assert engine.lookup(other) == 2 * CHUNK


def test_one_tensor_when_no_tuple_is_wanted(engine, fmt):
    tokens, kv = make_tokens(40), make_kv(40, fmt)
    engine.store(tokens, kv)
    blob, _ = engine.retrieve(tokens, None, False)
    inner = (40, HEADS, HEAD_SIZE) if fmt == "vllm" else (HEADS, 40, HEAD_SIZE)
    assert blob.shape == (LAYERS, 2, *inner)
    assert is_same(tuple((layer[0], layer[1]) for layer in blob), kv)


@pytest.mark.parametrize("num_masked", [0, 1, CHUNK - 1, CHUNK, CHUNK + 3, 2 * CHUNK, 40, 43])
def test_masks_of_any_length_when_retrieving(engine, fmt, num_masked):
    tokens, kv = make_tokens(43), make_kv(43, fmt)
    engine.store(tokens, kv)
    retrieved, mask = engine.retrieve(tokens, suffix_mask(43, num_masked))
    assert mask.tolist() == [False] * num_masked + [True] * (43 - num_masked)
    assert is_same(retrieved, cut(kv, fmt, num_masked) if num_masked < 43 else ())


def test_masked_chunks_need_not_be_there(engine, fmt):
    tokens, kv = make_tokens(60), make_kv(60, fmt)
    engine.store(tokens, cut(kv, fmt, 2 * CHUNK), suffix_mask(60, 2 * CHUNK))
    assert engine.lookup(tokens) == 0
    retrieved, _ = engine.retrieve(tokens, suffix_mask(60, 2 * CHUNK + 1))
    assert is_same(retrieved, cut(kv, fmt, 2 * CHUNK + 1))


def test_existing_chunks_stay_up_to_the_first_that_is_missing(engine, fmt):
    tokens, old, new = make_tokens(64), make_kv(64, fmt), make_kv(64, fmt, seed=1)
    engine.store(tokens[:32], cut(old, fmt, 0, 32))
    engine.store(tokens, new)
    retrieved, _ = engine.retrieve(tokens)
    assert is_same(cut(retrieved, fmt, 0, 32), cut(old, fmt, 0, 32))
    assert is_same(cut(retrieved, fmt, 32), cut(new, fmt, 32))


def test_existing_chunks_are_replaced_when_asked(engine, fmt):
    tokens, new = make_tokens(50), make_kv(50, fmt, seed=1)
    engine.store(tokens, make_kv(50, fmt))
    engine.store(tokens, new, skip_existing=False)
    assert is_same(engine.retrieve(tokens)[0], new)


def test_tensors_may_be_changed_after_a_store(engine, fmt):
    for blocking in (True, False):
        tokens, kv = make_tokens(40, seed=int(blocking)), make_kv(40, fmt)
        engine.store(tokens, kv, blocking=blocking)
        expected = tuple((k.clone(), v.clone()) for k, v in kv)
        for k, v in kv:
            k.zero_()
            v.zero_()
        assert is_same(engine.retrieve(tokens)[0], expected)


def test_views_and_tensors_with_gradients_can_be_stored(engine, fmt):
    tokens, kv = make_tokens(40), make_kv(40, fmt)
    odd = tuple((k.transpose(0, 2).contiguous().transpose(0, 2).requires_grad_(), v) for k, v in kv)
    engine.store(tokens, odd)
    retrieved, _ = engine.retrieve(tokens)
    assert is_same(retrieved, kv)
    assert not retrieved[0][0].requires_grad


def test_a_chunk_that_does_not_fit_its_key_is_a_miss(engine, fmt):
    tokens, kv = make_tokens(4 * CHUNK), make_kv(4 * CHUNK, fmt)
    engine.store(tokens, kv)
    for spoil in (lambda chunk: chunk[:, :, :1], lambda chunk: chunk.float(), lambda chunk: chunk[0]):
        key = engine._keys(tokens)[2]
        good = engine.engine_.chunks[key]
        engine.engine_.chunks[key] = spoil(good)
        retrieved, mask = engine.retrieve(tokens)
        assert is_same(retrieved, cut(kv, fmt, 0, 2 * CHUNK))
        assert mask.sum() == 2 * CHUNK
        engine.engine_.chunks[key] = good


# ---- refusals ----


def test_assertions_of_store_say_what_is_wrong(engine, fmt):
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


def test_unequal_layers_are_refused(engine, fmt):
    kv = make_kv(40, fmt)
    with pytest.raises(ValueError, match="same shape and dtype"):
        engine.store(make_tokens(40), (*kv[:-1], (kv[-1][0], kv[-1][1].float())))
    with pytest.raises(ValueError, match="same shape and dtype"):  # would be spread over all heads by copy_
        engine.store(make_tokens(40), (*kv[:-1], (kv[-1][0], kv[-1][1][..., :1])))


@pytest.mark.parametrize(("dimension", "size"), [(0, LAYERS + 1), (3, HEADS + 1), (4, HEAD_SIZE // 2)])
def test_kv_of_another_geometry_is_neither_stored_nor_served(engine, fmt, dimension, size):
    theirs = list(make_metadata().kv_shape)
    theirs[dimension] = size
    if fmt == "huggingface":
        theirs[2], theirs[3] = theirs[3], theirs[2]
    blob = torch.zeros(theirs, dtype=torch.float16)
    tokens = make_tokens(CHUNK)
    with pytest.raises(ValueError, match=r"is not what metadata\.kv_shape says"):
        engine.store(tokens, engine._blob_to_tuple_kv(blob))
    engine.engine_.put(engine._keys(tokens)[0], blob)  # somebody else's engine wrote it
    assert engine.lookup(tokens) == CHUNK
    retrieved, found = engine.retrieve(tokens)
    assert retrieved == ()
    assert not found.any()


def test_unknown_formats_are_refused():
    engine = make_engine("other")
    with pytest.raises(ValueError, match="Invalid format: other"):
        engine.store(make_tokens(20), make_kv(20))
    with pytest.raises(ValueError, match="Invalid format: other"):
        engine.retrieve(make_tokens(20))


def test_defect_23_masks_with_holes_and_of_other_lengths_are_refused(engine, fmt):
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


def test_defect_23_retrieved_tensors_can_be_used_in_place_anywhere(engine, fmt):
    tokens = make_tokens(40)
    with torch.inference_mode():
        engine.store(tokens, make_kv(40, fmt))
        retrieved, mask = engine.retrieve(tokens)
    for tensor in (retrieved[0][0], mask, engine.retrieve(tokens, None, False)[0]):
        assert not tensor.is_inference()
        tensor.zero_()  # an inference tensor would raise here
    assert engine.retrieve(tokens)[0][0][0].any()


# ---- keys ----


def golden_hashes(tokens: list[int]) -> list[str]:
    """The chain of the LMCache 0.1-0.3 API, written down once more."""
    hashes, before = [], ""
    for start in range(0, len(tokens), CHUNK):
        raw = b"".join(token.to_bytes(8, "little") for token in tokens[start : start + CHUNK])
        before = hashlib.sha256(before.encode("ascii") + raw).hexdigest()
        hashes.append(before)
    return hashes


def test_defect_25_keys_are_the_documents_byte_for_byte(engine, fmt):
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


def test_defect_22_tokens_of_any_integer_type_have_the_same_keys(engine, fmt):
    tokens = make_tokens(40) % 100
    engine.store(tokens.to(torch.int32), make_kv(40, fmt))
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        assert engine.lookup(tokens.to(dtype)) == 40
    assert engine.lookup(tokens.repeat_interleave(2)[::2]) == 40  # a view with strides


def test_the_documents_helpers_agree_with_the_engine(engine, fmt):
    tokens, kv = make_tokens(40), make_kv(40, fmt)
    blob = engine._tuple_kv_to_blob(kv)
    assert is_same(engine._blob_to_tuple_kv(blob), kv)
    assert engine._num_tokens_in_kv(kv, fmt) == 40
    by_hand = list(engine._make_chunks(tokens, blob, fmt, skip_existing=False))
    assert [chunk_hash for chunk_hash, _ in by_hand] == golden_hashes(tokens.tolist())
    engine.store(tokens[:CHUNK], cut(kv, fmt, 0, CHUNK))
    missing = list(engine._make_chunks(tokens, blob, fmt))
    assert [chunk_hash for chunk_hash, _ in missing] == golden_hashes(tokens.tolist())[1:]
    for chunk_hash, chunk in (*by_hand, *missing):
        assert chunk.is_contiguous()
        engine.engine_.put(engine._make_key(chunk_hash, fmt), chunk)
    assert is_same(engine.retrieve(tokens)[0], kv)
    assert not list(engine._make_chunks(tokens, blob, fmt))
    with pytest.raises(ValueError, match="Invalid format: odd"):
        engine._slice_kv_at(0, blob, "odd")
    with pytest.raises(AssertionError):
        engine._make_chunks(tokens, blob, fmt, 1, skip_existing=False)


# ---- work that is spared, and counters ----


def test_defect_24_nothing_is_built_when_nothing_is_missing(engine, fmt, monkeypatch):
    tokens, kv = make_tokens(40), make_kv(40, fmt)
    copied: list[int] = []
    copy = tensors.copy

    def counted(target, source):
        copied.append(source.nbytes)
        copy(target, source)

    monkeypatch.setattr(tensors, "copy", counted)
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


def test_defect_27_hits_and_misses_are_counted_in_tokens(engine, fmt):
    tokens, kv = make_tokens(64), make_kv(64, fmt)
    assert engine.hit_rate == 0.0
    engine.store(tokens[:32], cut(kv, fmt, 0, 32))
    engine.retrieve(tokens)
    assert (engine.hit_tokens_count, engine.miss_tokens_count, engine.hit_rate) == (32, 32, 0.5)
    engine.retrieve(make_tokens(64, seed=9))  # a full miss counts, too
    assert (engine.hit_tokens_count, engine.miss_tokens_count, engine.hit_rate) == (32, 96, 0.25)
    engine.retrieve(tokens, suffix_mask(64, 20))  # what is masked was not asked for
    assert (engine.hit_tokens_count, engine.miss_tokens_count) == (44, 128)


def test_threads_count_every_token(engine, fmt):
    tokens = make_tokens(32)
    engine.store(tokens, make_kv(32, fmt))
    threads = [
        threading.Thread(target=lambda: [engine.retrieve(tokens) for _ in range(50)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.hit_tokens_count == 4 * 50 * 32


# ---- against an oracle ----

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(
    lambda bits: torch.cat([make_tokens(CHUNK, seed=bit) for bit in bits])
)
STEPS = st.lists(
    st.tuples(st.sampled_from(["store", "retrieve", "evict"]), PROMPTS, st.integers(0, 80), st.booleans()),
    max_size=25,
)


@settings(max_examples=60)
@given(STEPS, st.sampled_from(FORMATS), st.booleans())
def test_engine_against_a_dict_of_prefixes(steps, fmt, is_ours):
    """The oracle holds, per prefix that ends at a chunk's end or is a whole prompt, its last chunk's KV."""
    engine = LMCacheEngine(make_config(), make_metadata(fmt)) if is_ours else make_engine(fmt)
    oracle = {}
    for seed, (step, prompt, number, flag) in enumerate(steps):
        tokens = prompt[: max(1, len(prompt) - number % CHUNK)]
        ends = [*range(CHUNK, len(tokens), CHUNK), len(tokens)]
        prefixes = [tuple(tokens[:end].tolist()) for end in ends]
        num_there = next((i for i, prefix in enumerate(prefixes) if prefix not in oracle), len(prefixes))
        if step == "store":
            kv = make_kv(len(tokens), fmt, seed)
            engine.store(tokens, kv, skip_existing=flag, blocking=bool(number % 2))
            for index in range(num_there if flag else 0, len(ends)):
                oracle[prefixes[index]] = cut(kv, fmt, index * CHUNK, ends[index])
        elif step == "evict" and oracle:
            victim = sorted(oracle)[number % len(oracle)]
            del oracle[victim]
            engine.engine_.remove(engine._keys(torch.tensor(victim))[-1])
        else:
            assert engine.lookup(tokens) == ([0, *ends])[num_there]
            num_masked = min(number, len(tokens))
            first = num_masked // CHUNK
            found = []
            for prefix in prefixes[first:]:
                if prefix not in oracle:
                    break
                found.append(oracle[prefix])
            retrieved, mask = engine.retrieve(tokens, suffix_mask(len(tokens), num_masked))
            if num_masked == len(tokens) or not found:
                assert retrieved == ()
                assert not mask.any()
                continue
            dim = FORMATS.index(fmt)
            joined = tuple(
                tuple(torch.cat([chunk[layer][part] for chunk in found], dim) for part in (0, 1))
                for layer in range(LAYERS)
            )
            assert is_same(retrieved, cut(joined, fmt, num_masked - first * CHUNK))
            stop = num_masked + retrieved[0][0].shape[dim]
            assert mask.tolist() == [num_masked <= i < stop for i in range(len(tokens))]
