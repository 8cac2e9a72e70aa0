"""Block hashes that are derived without vLLM equal those of vLLM."""

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from lmcache.block_hashes import MAX_TOKEN, ExtraKeys, block_hashes, encode, root_of
from lmcache.engines.vllm.hashes import hashes_of_engine
from tests.harness.scope import examples

pytestmark = pytest.mark.vllm

BLOCK = 4
VALUES = st.recursive(
    st.none() | st.integers(0, (1 << 64) - 1) | st.binary(max_size=300) | st.text(max_size=300),
    lambda children: st.lists(children, max_size=30).map(tuple),
    max_leaves=30,
)


@given(VALUES)
def test_encoding_is_the_canonical_cbor_form(value):
    assert encode(value) == cbor2.dumps(value, canonical=True)


@settings(max_examples=examples(50))
@given(
    st.lists(st.integers(0, MAX_TOKEN), min_size=1, max_size=40),
    st.sampled_from(["", "salt", "sält"]),
    st.booleans(),
    st.text("0123456789", max_size=3),
)
def test_hashes_of_a_request_are_those_of_vllm(tokens, salt, has_adapter, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", seed)
        patch.setattr(kv_cache_utils, "NONE_HASH", None, raising=False)
        patch.setattr(kv_cache_utils, "_NONE_HASH_SEED", None, raising=False)
        kv_cache_utils.init_none_hash(sha256_cbor)
        request = Request(
            "r",
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(),
            pooling_params=None,
            cache_salt=salt or None,
            lora_request=LoRARequest("mine", 1, "/adapters/mine") if has_adapter else None,
            block_hasher=kv_cache_utils.get_request_block_hasher(BLOCK, sha256_cbor),
        )
        engine = hashes_of_engine("sha256_cbor", BLOCK)
    assert engine.root == root_of(seed)
    extra = ExtraKeys(salt, *(("mine", "/adapters/mine") if has_adapter else ("", "")))
    derived = block_hashes(tokens, BLOCK, engine.root, extra, is_tagged=engine.tags_extra_keys)
    assert list(derived) == list(request.block_hashes)


def test_root_of_a_seed_never_changes():
    assert root_of("0").hex() == "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e"


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash", "xxhash_cbor"])
def test_other_algorithms_have_no_root(algorithm):
    assert hashes_of_engine(algorithm, BLOCK).root == b""
    assert hashes_of_engine(algorithm, BLOCK).algorithm == algorithm


def test_an_engine_that_hashes_in_another_way_has_no_root(monkeypatch):
    hash_block_tokens = kv_cache_utils.hash_block_tokens
    monkeypatch.setattr(
        kv_cache_utils, "hash_block_tokens", lambda hash_function, *rest: hash_block_tokens(repr_hash, *rest)
    )
    assert hashes_of_engine("sha256_cbor", BLOCK).root == b""


def repr_hash(value):
    return sha256_cbor(repr(value))


@pytest.mark.parametrize("token", [-1, MAX_TOKEN + 1])
def test_token_ids_out_of_range_are_refused(token):
    with pytest.raises(ValueError, match="token id"):
        list(block_hashes([1, 2, 3, token], BLOCK, root_of("0")))
