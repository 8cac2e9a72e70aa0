"""Prompts, configurations and models that may be blended. Every accepted prompt gets an answer."""

import copy

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from lmcache.blend.selection import AllTokens, LargestDeviation, NoTokens, Selection
from lmcache.huggingface import BlendedModel
from testing.blend.tiny import BOS, VOCAB_SIZE, WINDOW, engine_for, random_tokens, tiny_model
from tests.integration.test_blended_model import (
    DOCUMENTS,
    QUESTION,
    blended,
    joined,
    kv_alone,
    kv_of,
    kv_of_segments,
)

PROMPT = [*DOCUMENTS, QUESTION]
GENERATE = {"max_new_tokens": 5, "do_sample": False}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def is_exact(blended_model, prompt) -> bool:
    """Whether the model's exact answer is given without a read of stored segments."""
    tokens = torch.tensor([[int(token) for segment in prompt for token in segment]])
    blended_model.precompute(prompt[:-1])
    num_hits_before = blended_model.segments.hit_tokens_count
    result = blended_model.generate(prompt, **GENERATE)
    assert torch.equal(result, blended_model.model.generate(tokens, **GENERATE))
    return blended_model.segments.hit_tokens_count == num_hits_before


def is_exact_now(blended_model, prompt) -> bool:
    """Like ``is_exact``, without storing the documents first."""
    num_hits_before = blended_model.segments.hit_tokens_count
    blended_model.generate(prompt, **GENERATE)
    return blended_model.segments.hit_tokens_count == num_hits_before


def num_computed(blended_model, prompt) -> int:
    """Number of tokens behind the first segment that a prefill computes: their V differs from stored V."""
    cache = kv_of(blended_model.prefill([prompt])[0].cache)
    alone = kv_of_segments(blended_model.model, prompt)
    return int((cache != alone)[-1, 1, :, len(prompt[0]) :].any(0).any(-1).sum())


def test_enable_blending_switches_blending(model):
    with blended(model, enable_blending=False) as blended_model:
        blended_model.generate(PROMPT, **GENERATE)
        assert blended_model.segments.lookup(DOCUMENTS[0]) == 0
        assert is_exact(blended_model, PROMPT)
    with blended(model, enable_blending=True, selection=AllTokens()) as blended_model:
        assert not is_exact(blended_model, PROMPT)


def test_blend_recompute_ratio_sets_the_number_of_computed_tokens(model):
    for ratio in (0.1, 0.4):
        with blended(model, blend_recompute_ratio=ratio) as blended_model:
            blended_model.precompute(DOCUMENTS)
            # No token of the first document: computing does not change a document at its stored position.
            num_selected = int(ratio * sum(map(len, DOCUMENTS)))
            assert num_computed(blended_model, PROMPT) == num_selected + len(QUESTION)


def test_blend_min_tokens_excludes_shorter_prompts(model):
    num_tokens = sum(map(len, PROMPT))
    with blended(model, blend_min_tokens=num_tokens + 1) as blended_model:
        assert is_exact(blended_model, PROMPT)
        with torch.no_grad():
            expected = model(joined(PROMPT), logits_to_keep=1).logits[0]
            assert torch.equal(blended_model.prefill([PROMPT])[0].logits, expected)
    with blended(model, blend_min_tokens=num_tokens, selection=AllTokens()) as blended_model:
        assert not is_exact(blended_model, PROMPT)


@pytest.fixture(scope="module")
def tokenizer():
    """A tokenizer that maps each number to one token. Every text starts with <s>."""
    words = {"<unk>": 0, "<s>": BOS, **{str(number): number for number in range(2, VOCAB_SIZE)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


def test_blend_separator_splits_texts_into_segments(model, tokenizer):
    def text(separator):
        return separator.join(" ".join(map(str, segment.tolist())) for segment in PROMPT)

    for separator in ("[BLEND_SEP]", " # # "):
        with blended(model, tokenizer, blend_separator=separator) as blended_model:
            assert list(map(list, blended_model.split(text(separator)))) == [[BOS], *map(list, PROMPT)]
            assert list(map(list, blended_model.split(separator + text(separator * 2) + separator))) == [
                [BOS],
                *map(list, PROMPT),
            ]
            expected = blended_model.generate([[BOS], *PROMPT], **GENERATE)
            assert torch.equal(blended_model.generate(text(separator), **GENERATE), expected)
            assert blended_model.segments.lookup(DOCUMENTS[1]) == len(DOCUMENTS[1])
            assert len(blended_model.split(text("[OTHER]").replace("[OTHER]", " "))) == 2
    with blended(model) as blended_model, pytest.raises(ValueError, match="needs a tokenizer"):
        blended_model.generate("1 2")
    with blended(model, tokenizer) as blended_model, pytest.raises(ValueError, match="no tokens"):
        blended_model.generate("[BLEND_SEP]")


def test_blend_add_special_in_precomp_computes_segments_behind_bos(model, tokenizer):
    alone, behind = kv_alone(model, DOCUMENTS[1]), kv_alone(model, DOCUMENTS[1], before=[BOS])
    assert not torch.allclose(alone, behind, atol=1e-2)
    for tokenizers in ((), (tokenizer,)):
        for is_added, expected in ((False, alone), (True, behind)):
            options = {"blend_add_special_in_precomp": is_added, "selection": NoTokens()}
            with blended(model, *tokenizers, **options) as blended_model:
                blended_model.precompute(DOCUMENTS)
                result = kv_of(
                    blended_model.prefill([[[BOS], DOCUMENTS[1], DOCUMENTS[0], QUESTION]])[0].cache
                )
                assert torch.allclose(result[:, 1, :, 1 : 1 + len(DOCUMENTS[1])], expected[:, 1], atol=1e-4)


def test_segments_computed_behind_bos_are_reused_only_behind_bos(model):
    with blended(model, blend_add_special_in_precomp=True, selection=AllTokens()) as blended_model:
        assert is_exact(blended_model, PROMPT)
        assert not is_exact(blended_model, [[BOS], *PROMPT])


def test_segments_with_and_without_special_tokens_have_different_keys(model):
    with engine_for(model) as engine:
        plain = BlendedModel(model, engine)
        engine.config.blend_add_special_in_precomp = True
        behind = BlendedModel(model, engine)
        plain.precompute(DOCUMENTS)
        assert plain.segments.lookup(DOCUMENTS[0]) == len(DOCUMENTS[0])
        assert behind.segments.lookup(DOCUMENTS[0]) == 0
        plain.close()
        behind.close()
        first, second = (BlendedModel(model, engine.salted(salt)) for salt in ("one", "other"))
        first.precompute(DOCUMENTS)
        assert (second.segments.lookup(DOCUMENTS[0]), engine.salted("one").lookup(DOCUMENTS[0])) == (0, 0)
        first.close()
        second.close()


def test_segments_are_computed_once(model):
    with blended(model) as blended_model:
        assert blended_model.precompute([*DOCUMENTS, DOCUMENTS[0].tolist(), []]) == sum(map(len, DOCUMENTS))
        assert blended_model.precompute(DOCUMENTS[:2]) == 0
        blended_model.generate(PROMPT, **GENERATE)
        assert blended_model.precompute(DOCUMENTS) == 0
        assert blended_model.segments.lookup(QUESTION) == 0  # the last segment is always computed in place


def test_unknown_segments_are_stored_during_generation(model):
    with blended(model) as blended_model:
        cold = blended_model.generate(PROMPT, **GENERATE)
        assert blended_model.segments.hit_tokens_count == 0
        assert torch.equal(blended_model.generate(PROMPT, **GENERATE), cold)
        assert blended_model.segments.hit_tokens_count == sum(map(len, DOCUMENTS))


def test_empty_and_repeated_segments_are_accepted_and_malformed_ones_refused(model):
    empty: list[int] = []
    twice = [DOCUMENTS[0], empty, DOCUMENTS[0], QUESTION, empty]
    with blended(model, selection=LargestDeviation(1.0)) as blended_model:
        assert not is_exact(blended_model, twice)
        assert is_exact(blended_model, [QUESTION, empty])  # one segment
        for prompt in ([], [empty], [empty, empty]):
            with pytest.raises(ValueError, match="no tokens"):
                blended_model.generate(prompt)
        for segment, result in (
            ([0.5], "float32"),
            ([[1]], r"\[1, 1\]"),
            ([True], "bool"),
            ([None], "NoneType"),
            (["a"], "str"),
        ):
            with pytest.raises(ValueError, match=f"a text or a list of token ids.*{result}"):
                blended_model.generate([segment, QUESTION])
        for prompts, num_logits in (([PROMPT], 10), ([PROMPT], 0), ([], 1)):
            with pytest.raises(ValueError, match=f"Invalid num_logits: {num_logits}"):
                blended_model.prefill(prompts, num_logits)


def test_prompts_longer_than_the_window_are_answered_exactly(model):
    (long,) = random_tokens(WINDOW)
    with blended(model) as blended_model:
        assert is_exact(blended_model, [long, QUESTION])


def test_unsupported_models_are_refused_with_the_reason():
    unsupported = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50)).eval()
    windows = tiny_model("mistral", sliding_window=8)
    dynamic = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    flex = tiny_model("llama", "flex_attention")
    for model, reason in (
        (unsupported, "model type gpt2 is not one of"),
        (windows, "sliding windows"),
        (dynamic, "its rotary embedding is dynamic"),
        (flex, "attn_implementation flex_attention"),
    ):
        with engine_for(model) as engine, pytest.raises(ValueError, match=f"can't be blended: .*{reason}"):
            BlendedModel(model, engine)


def test_special_tokens_before_a_text_become_a_segment(model, tokenizer):
    behind = copy.deepcopy(tokenizer)
    behind._tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <unk>", special_tokens=[("<s>", BOS), ("<unk>", 0)]
    )
    plain = copy.deepcopy(tokenizer)
    plain._tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <unk>", special_tokens=[("<unk>", 0)]
    )
    for tokenizers, first in ((tokenizer, [[BOS]]), (behind, [[BOS]]), (plain, [])):
        with blended(model, tokenizers) as blended_model:
            assert [s.tolist() for s in blended_model.split("7 8[BLEND_SEP]9")] == [*first, [7, 8], [9]]
            assert [s.tolist() for s in blended_model.split(["7 8", "9"])] == [*first, [7, 8], [9]]
            assert blended_model.precompute(["7 8", "9"]) == 3
            assert blended_model.precompute("7 8[BLEND_SEP]9[BLEND_SEP]7") == 1
            with pytest.raises(ValueError, match="give a tokenizer's input_ids, or the text"):
                blended_model.generate(tokenizers("7 8"))
            assert is_exact(blended_model, [*first, DOCUMENTS[0]])  # only <s> stands before the last segment


def test_selection_in_the_last_layer_is_refused(model):
    with engine_for(model) as engine:
        for layer in (3, 7):
            with pytest.raises(ValueError, match=f"layer {layer} leaves none of 4 to save"):
                BlendedModel(model, engine, selection=LargestDeviation(0.15, layer))


def test_selection_may_read_attention_together_with_deviation(model):
    scored = []

    class Both(LargestDeviation):
        reads_attention = True

        def score(self, tokens):
            scored.append((tokens.attention, tokens.deviation))
            return super().score(tokens)

    with blended(model, selection=Both(1.0)) as blended_model:
        assert not is_exact(blended_model, PROMPT)
    (attention, deviation), *_ = scored
    assert attention.shape == deviation.shape == (sum(map(len, PROMPT)),)
    assert 0 < attention.max() <= 4  # layers


def test_selection_that_returns_no_mask_is_refused(model):
    class Indices(Selection):
        def select(self, tokens):
            return torch.arange(len(tokens.is_valid))

    with (
        blended(model, selection=Indices()) as blended_model,
        pytest.raises(ValueError, match="must be a bool mask"),
    ):
        blended_model.generate(PROMPT)


def test_user_defined_selection_is_applied(model):
    class Odd(Selection):
        def select(self, tokens):
            return tokens.original_positions % 2 == 1  # also positions of tokens that are not valid

    with blended(model, selection=Odd()) as blended_model:
        blended_model.precompute(DOCUMENTS)
        assert num_computed(blended_model, PROMPT) == (33 // 2 + 50 // 2) + len(QUESTION)


def test_other_calls_of_the_model_are_unchanged(model):
    expected = model.generate(joined(PROMPT), **GENERATE)
    with blended(model, selection=NoTokens()) as blended_model:
        blended_model.generate(PROMPT, **GENERATE)
        assert torch.equal(model.generate(joined(PROMPT), **GENERATE), expected)
    with engine_for(model) as engine:
        for _ in range(3):  # models that are dropped without close() leave no hooks
            BlendedModel(model, engine)
    for layer in model.get_decoder().layers:
        assert not layer._forward_pre_hooks
        assert not layer.self_attn._forward_hooks
