"""Blending where something fails, is lost or changes: it costs time, never the answer."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from lmcache.blend.retriever import SPTBlendRetrieverTask
from lmcache.blend.selection import AllTokens, NoTokens, Selection
from lmcache.engines.huggingface.blending import BlendedCache
from testing.blend.tiny import VOCAB_SIZE, tiny_model
from tests.integration.test_blended_model import joined, kv_of
from tests.integration.test_blended_prompts import (
    DOCUMENTS,
    GENERATE,
    PROMPT,
    QUESTION,
    blended,
    is_exact,
    is_exact_now,
    num_computed,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def test_what_the_cache_lost_is_computed(model):
    num_bytes_per_token = 4 * 2 * 2 * 16 * 4  # layers, K and V, heads, head size, float32
    with blended(model, max_local_cache_size=48 * num_bytes_per_token / 2**30, selection=NoTokens()) as one:
        for documents in (DOCUMENTS, DOCUMENTS[::-1]):
            one.precompute(documents)
            prompt = [*documents, QUESTION]
            with torch.no_grad():
                found = one.prefill([prompt])[0]
            assert found.cache.get_seq_length() == sum(map(len, prompt))
            assert torch.isfinite(kv_of(found.cache)).all()
    with blended(model, selection=NoTokens()) as one:
        one.precompute(DOCUMENTS)
        whole = one.segments.retrieve_into

        def some_chunks_only(tokens, out):
            return min(whole(tokens, out), 16)

        expected = kv_of(one.prefill([PROMPT])[0].cache)
        one.segments.retrieve_into = some_chunks_only  # as when chunks went
        assert torch.equal(kv_of(one.prefill([PROMPT])[0].cache), expected)
        one.segments.store = one.segments.retrieve_into = lambda *_: 0  # nothing can be kept
        assert num_computed(one, PROMPT) == len(QUESTION)


@pytest.mark.parametrize("method", ["lookup", "empty", "retrieve_into", "store"])
def test_a_fault_of_the_cache_is_no_fault_of_the_answer(model, method):
    def broken(*args, **kwargs):
        raise OSError("the storage is gone")

    with blended(model, selection=NoTokens()) as one:
        healthy = one.prefill([PROMPT])[0].logits
    with blended(model, selection=NoTokens()) as one:
        setattr(one.segments, method, broken)
        assert one.precompute(DOCUMENTS) == sum(map(len, DOCUMENTS))
        found = one.prefill([PROMPT])[0].logits
    with torch.no_grad():
        full = model(joined(PROMPT), logits_to_keep=1).logits[0]
    # Where there is no memory for what would be reused, everything is computed.
    assert torch.equal(found, full if method == "empty" else healthy)
    assert not torch.equal(healthy, full)


def test_a_server_that_is_gone_costs_time_only(model):
    url = "lm://127.0.0.1:1"  # nobody listens
    with blended(
        model, local_device=None, remote_url=url, remote_serde="torch", selection=AllTokens()
    ) as one:
        assert torch.equal(one.generate(PROMPT, **GENERATE), model.generate(joined(PROMPT), **GENERATE))


def test_a_model_that_changed_is_answered_exactly(model):
    changed = tiny_model("llama")
    with blended(changed, selection=NoTokens()) as one:
        changed.set_attn_implementation("flex_attention")
        with torch.no_grad():
            assert one.prefill([PROMPT])[0].logits.shape == (1, VOCAB_SIZE)
        assert one.segments.lookup(DOCUMENTS[0]) == 0
    with blended(tiny_model("llama"), selection=NoTokens()) as one:
        one.precompute(DOCUMENTS)
        one.model.train()
        assert is_exact_now(one, PROMPT)
        with pytest.raises(ValueError, match="in training mode"):
            one.precompute(DOCUMENTS)
        one.model.eval()
        assert not is_exact_now(one, PROMPT)
        one.close()
        assert is_exact(one, PROMPT)


def test_retrieved_kv_may_be_on_another_device(model, monkeypatch):
    """As when the engine gives it out on a GPU and the model is elsewhere: what a pass changes is a copy."""
    with blended(model) as one:
        one.precompute(DOCUMENTS)
        expected = one.prefill([PROMPT], 9)[0].logits
        given = SPTBlendRetrieverTask.result

        def copied(task, layer_id):
            found = given(task, layer_id)
            return replace(found, k=found.k.clone(), v=found.v.clone())

        monkeypatch.setattr(SPTBlendRetrieverTask, "result", copied)
        assert torch.equal(one.prefill([PROMPT], 9)[0].logits, expected)


def test_a_pass_that_failed_holds_no_memory(model):
    class Failing(Selection):
        def select(self, tokens):
            raise RuntimeError("no")

    def caches():
        return {id(thing) for thing in gc.get_objects() if type(thing) is BlendedCache}

    with blended(model, selection=Failing()) as one:
        gc.collect()
        before = caches()
        gc.disable()
        try:
            with pytest.raises(RuntimeError, match="no"):
                one.generate(PROMPT)
            assert caches() <= before
        finally:
            gc.enable()
        one.selection = AllTokens()
        assert not is_exact(one, PROMPT)
