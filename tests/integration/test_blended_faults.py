"""Faults, losses and changes during blending cost time and never change the answer."""

import gc
from dataclasses import replace

import pytest
import torch

from lmcache.blend.retriever import SPTBlendRetrieverTask
from lmcache.blend.selection import AllTokens, NoTokens, Selection
from lmcache.huggingface.blending import BlendedCache
from testing.blend.tiny import VOCAB_SIZE, tiny_model
from tests.integration.test_blended_model import DOCUMENTS, QUESTION, blended, joined, kv_of
from tests.integration.test_blended_prompts import PROMPT, is_exact, is_exact_now, num_computed

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def test_evicted_chunks_are_recomputed(model):
    num_bytes_per_token = 4 * 2 * 2 * 16 * 4  # layers, K and V, heads, head size, float32
    with blended(
        model, max_local_cache_size=48 * num_bytes_per_token / 2**30, selection=NoTokens()
    ) as blended_model:
        for documents in (DOCUMENTS, DOCUMENTS[::-1]):
            blended_model.precompute(documents)
            prompt = [*documents, QUESTION]
            with torch.no_grad():
                result = blended_model.prefill([prompt])[0]
            assert result.cache.get_seq_length() == sum(map(len, prompt))
            assert torch.isfinite(kv_of(result.cache)).all()
    with blended(model, selection=NoTokens()) as blended_model:
        blended_model.precompute(DOCUMENTS)
        retrieve_into = blended_model.segments.retrieve_into

        def some_chunks_only(tokens, out):
            return min(retrieve_into(tokens, out), 16)

        expected = kv_of(blended_model.prefill([PROMPT])[0].cache)
        blended_model.segments.retrieve_into = some_chunks_only  # as if chunks were evicted
        assert torch.equal(kv_of(blended_model.prefill([PROMPT])[0].cache), expected)
        blended_model.segments.store = blended_model.segments.retrieve_into = lambda *_: (
            0
        )  # nothing can be stored
        assert num_computed(blended_model, PROMPT) == len(QUESTION)


@pytest.mark.parametrize("method", ["lookup", "empty", "retrieve_into", "store"])
def test_cache_faults_do_not_change_the_answer(model, method):
    def broken(*args, **kwargs):
        raise OSError("the storage is unavailable")

    with blended(model, selection=NoTokens()) as blended_model:
        healthy = blended_model.prefill([PROMPT])[0].logits
    with blended(model, selection=NoTokens()) as blended_model:
        setattr(blended_model.segments, method, broken)
        assert blended_model.precompute(DOCUMENTS) == sum(map(len, DOCUMENTS))
        result = blended_model.prefill([PROMPT])[0].logits
    with torch.no_grad():
        full = model(joined(PROMPT), logits_to_keep=1).logits[0]
    # If memory for the reused KV cannot be allocated, everything is computed.
    assert torch.equal(result, full if method == "empty" else healthy)
    assert not torch.equal(healthy, full)


def test_changed_model_is_answered_without_stored_segments(model):
    changed = tiny_model("llama")
    with blended(changed, selection=NoTokens()) as blended_model:
        changed.set_attn_implementation("flex_attention")
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # compiling takes a C++ compiler
            assert blended_model.prefill([PROMPT])[0].logits.shape == (1, VOCAB_SIZE)
        assert blended_model.segments.lookup(DOCUMENTS[0]) == 0
    with blended(tiny_model("llama"), selection=NoTokens()) as blended_model:
        blended_model.precompute(DOCUMENTS)
        blended_model.model.train()
        assert is_exact_now(blended_model, PROMPT)
        with pytest.raises(ValueError, match="in training mode"):
            blended_model.precompute(DOCUMENTS)
        blended_model.model.eval()
        assert not is_exact_now(blended_model, PROMPT)
        blended_model.close()
        assert is_exact(blended_model, PROMPT)


def test_retrieved_kv_on_another_device_is_copied(model, monkeypatch):
    """The engine may return KV on a GPU while the model runs elsewhere: a pass changes only its copy."""
    with blended(model) as blended_model:
        blended_model.precompute(DOCUMENTS)
        expected = blended_model.prefill([PROMPT], 9)[0].logits
        original_result = SPTBlendRetrieverTask.result

        def copied(task, layer_id):
            result = original_result(task, layer_id)
            return replace(result, k=result.k.clone(), v=result.v.clone())

        monkeypatch.setattr(SPTBlendRetrieverTask, "result", copied)
        assert torch.equal(blended_model.prefill([PROMPT], 9)[0].logits, expected)


def test_failed_pass_releases_its_memory(model):
    class Failing(Selection):
        def select(self, tokens):
            raise RuntimeError("no")

    def live_caches():
        return {id(thing) for thing in gc.get_objects() if type(thing) is BlendedCache}

    with blended(model, selection=Failing()) as blended_model:
        gc.collect()
        caches_before = live_caches()
        gc.disable()
        try:
            with pytest.raises(RuntimeError, match="no"):
                blended_model.generate(PROMPT)
            assert live_caches() <= caches_before
        finally:
            gc.enable()
        blended_model.selection = AllTokens()
        assert not is_exact(blended_model, PROMPT)
