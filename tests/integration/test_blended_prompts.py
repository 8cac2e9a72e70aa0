"""What may be blended, as the configuration, the prompt and the cache say; whatever they say, an answer."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from lmcache.blend.selection import AllTokens, LargestDeviation, MostAttended, NoTokens, Selection
from lmcache.engines.huggingface import BlendedModel
from testing.blend.tiny import BOS, VOCAB_SIZE, WINDOW, engine_for, random_tokens, tiny_model
from tests.integration.test_blended_model import joined, kv_alone, kv_of

DOCUMENTS = random_tokens(40, 33, 50)
QUESTION = random_tokens(9, seed=1)[0]
PROMPT = [*DOCUMENTS, QUESTION]
GENERATE = {"max_new_tokens": 5, "do_sample": False}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@contextlib.contextmanager
def blended(model, *args, selection=None, **options):
    with engine_for(model, **options) as engine:
        one = BlendedModel(model, engine, *args, selection=selection)
        try:
            yield one
        finally:
            one.close()


def is_exact(one, prompt) -> bool:
    """Is it answered as the model answers, without a look at what is stored?"""
    tokens = torch.tensor([[int(token) for segment in prompt for token in segment]])
    one.precompute(prompt[:-1])
    before = one.segments.hit_tokens_count
    found = one.generate(prompt, **GENERATE)
    assert torch.equal(found, one.model.generate(tokens, **GENERATE))
    return one.segments.hit_tokens_count == before


def is_exact_now(one, prompt) -> bool:
    """The same of documents that are stored."""
    before = one.segments.hit_tokens_count
    one.generate(prompt, **GENERATE)
    return one.segments.hit_tokens_count == before


def num_computed(one, prompt) -> int:
    """Of the tokens of a prefill behind the first segment; the others' V is as it was alone."""
    cache = kv_of(one.prefill([prompt])[0].cache)
    alone = torch.cat([kv_alone(one.model, segment) for segment in prompt], -2)
    return int((cache != alone)[-1, 1, :, len(prompt[0]) :].any(0).any(-1).sum())


def test_enable_blending(model):
    with blended(model, enable_blending=False) as one:
        one.generate(PROMPT, **GENERATE)
        assert one.segments.lookup(DOCUMENTS[0]) == 0
        assert is_exact(one, PROMPT)
    with blended(model, enable_blending=True, selection=AllTokens()) as one:
        assert not is_exact(one, PROMPT)


def test_blend_recompute_ratio(model):
    for ratio in (0.1, 0.4):
        with blended(model, blend_recompute_ratio=ratio) as one:
            one.precompute(DOCUMENTS)
            # None of the first document: where it stands, computing does not change it.
            num_wanted = int(ratio * sum(map(len, DOCUMENTS)))
            assert num_computed(one, PROMPT) == num_wanted + len(QUESTION)


def test_blend_min_tokens(model):
    num_tokens = sum(map(len, PROMPT))
    with blended(model, blend_min_tokens=num_tokens + 1) as one:
        assert is_exact(one, PROMPT)
        with torch.no_grad():
            expected = model(joined(PROMPT), logits_to_keep=1).logits[0]
            assert torch.equal(one.prefill([PROMPT])[0].logits, expected)
    with blended(model, blend_min_tokens=num_tokens, selection=AllTokens()) as one:
        assert not is_exact(one, PROMPT)


@pytest.fixture(scope="module")
def tokenizer():
    """A word is a token, by its number; <s> stands before every text."""
    words = {"<unk>": 0, "<s>": BOS, **{str(number): number for number in range(2, VOCAB_SIZE)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


def test_blend_separator(model, tokenizer):
    def text(separator):
        return separator.join(" ".join(map(str, segment.tolist())) for segment in PROMPT)

    for separator in ("[BLEND_SEP]", " # # "):
        with blended(model, tokenizer, blend_separator=separator) as one:
            assert list(map(list, one.split(text(separator)))) == [[BOS], *map(list, PROMPT)]
            assert list(map(list, one.split(separator + text(separator * 2) + separator))) == [
                [BOS],
                *map(list, PROMPT),
            ]
            expected = one.generate([[BOS], *PROMPT], **GENERATE)
            assert torch.equal(one.generate(text(separator), **GENERATE), expected)
            assert one.segments.lookup(DOCUMENTS[1]) == len(DOCUMENTS[1])
            assert len(one.split(text("[OTHER]").replace("[OTHER]", " "))) == 2
    with blended(model) as one, pytest.raises(ValueError, match="needs a tokenizer"):
        one.generate("1 2")
    with blended(model, tokenizer) as one, pytest.raises(ValueError, match="no tokens"):
        one.generate("[BLEND_SEP]")


def test_blend_add_special_in_precomp(model, tokenizer):
    alone, behind = kv_alone(model, DOCUMENTS[1]), kv_alone(model, DOCUMENTS[1], before=[BOS])
    assert not torch.allclose(alone, behind, atol=1e-2)
    for given in ((), (tokenizer,)):
        for is_added, expected in ((False, alone), (True, behind)):
            options = {"blend_add_special_in_precomp": is_added, "selection": NoTokens()}
            with blended(model, *given, **options) as one:
                one.precompute(DOCUMENTS)
                found = kv_of(one.prefill([[[BOS], DOCUMENTS[1], DOCUMENTS[0], QUESTION]])[0].cache)
                assert torch.allclose(found[:, 1, :, 1 : 1 + len(DOCUMENTS[1])], expected[:, 1], atol=1e-4)


def test_what_was_computed_behind_special_tokens_stands_behind_them(model):
    with blended(model, blend_add_special_in_precomp=True, selection=AllTokens()) as one:
        assert is_exact(one, PROMPT)
        assert not is_exact(one, [[BOS], *PROMPT])


def test_the_two_kinds_of_segments_have_different_names(model):
    with engine_for(model) as engine:
        plain = BlendedModel(model, engine)
        engine.config.blend_add_special_in_precomp = True
        behind = BlendedModel(model, engine)
        plain.precompute(DOCUMENTS)
        assert plain.segments.lookup(DOCUMENTS[0]) == len(DOCUMENTS[0])
        assert behind.segments.lookup(DOCUMENTS[0]) == 0
        plain.close()
        behind.close()
        one, other = (BlendedModel(model, engine.salted(salt)) for salt in ("one", "other"))
        one.precompute(DOCUMENTS)
        assert (other.segments.lookup(DOCUMENTS[0]), engine.salted("one").lookup(DOCUMENTS[0])) == (0, 0)
        one.close()
        other.close()


def test_segments_are_computed_once(model):
    with blended(model) as one:
        assert one.precompute([*DOCUMENTS, DOCUMENTS[0].tolist(), []]) == sum(map(len, DOCUMENTS))
        assert one.precompute(DOCUMENTS[:2]) == 0
        one.generate(PROMPT, **GENERATE)
        assert one.precompute(DOCUMENTS) == 0
        assert one.segments.lookup(QUESTION) == 0  # computed in its place, whatever it is


def test_unseen_segments_are_computed_and_stored_on_the_way(model):
    with blended(model) as one:
        cold = one.generate(PROMPT, **GENERATE)
        assert one.segments.hit_tokens_count == 0
        assert torch.equal(one.generate(PROMPT, **GENERATE), cold)
        assert one.segments.hit_tokens_count == sum(map(len, DOCUMENTS))


def test_prompts_of_odd_segments(model):
    empty: list[int] = []
    twice = [DOCUMENTS[0], empty, DOCUMENTS[0], QUESTION, empty]
    with blended(model, selection=LargestDeviation(1.0)) as one:
        assert not is_exact(one, twice)
        assert is_exact(one, [QUESTION, empty])  # one segment
        for prompt in ([], [empty], [empty, empty]):
            with pytest.raises(ValueError, match="no tokens"):
                one.generate(prompt)
        for segment, found in (
            ([0.5], "float32"),
            ([[1]], r"\[1, 1\]"),
            ([True], "bool"),
            ([None], "NoneType"),
            (["a"], "str"),
        ):
            with pytest.raises(ValueError, match=f"a text or a list of token ids.*{found}"):
                one.generate([segment, QUESTION])
        for prompts, num_logits in (([PROMPT], 10), ([PROMPT], 0), ([], 1)):
            with pytest.raises(ValueError, match=f"Invalid num_logits: {num_logits}"):
                one.prefill(prompts, num_logits)


def test_a_prompt_longer_than_the_window_is_answered_exactly(model):
    (long,) = random_tokens(WINDOW)
    with blended(model) as one:
        assert is_exact(one, [long, QUESTION])


def test_models_that_can_not_be_blended_are_refused_with_the_reason():
    other = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50)).eval()
    windows = tiny_model("mistral", sliding_window=8)
    dynamic = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    flex = tiny_model("llama", "flex_attention")
    for model, reason in (
        (other, "its family gpt2 is not one of"),
        (windows, "sliding windows"),
        (dynamic, "its rotary embedding is dynamic"),
        (flex, "attn_implementation flex_attention"),
    ):
        with engine_for(model) as engine, pytest.raises(ValueError, match=f"can't be blended: .*{reason}"):
            BlendedModel(model, engine)


def test_special_tokens_are_those_before_a_text(model, tokenizer):
    behind = copy.deepcopy(tokenizer)
    behind._tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <unk>", special_tokens=[("<s>", BOS), ("<unk>", 0)]
    )
    plain = copy.deepcopy(tokenizer)
    plain._tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <unk>", special_tokens=[("<unk>", 0)]
    )
    for given, first in ((tokenizer, [[BOS]]), (behind, [[BOS]]), (plain, [])):
        with blended(model, given) as one:
            assert [s.tolist() for s in one.split("7 8[BLEND_SEP]9")] == [*first, [7, 8], [9]]
            assert [s.tolist() for s in one.split(["7 8", "9"])] == [*first, [7, 8], [9]]
            assert one.precompute(["7 8", "9"]) == 3
            assert one.precompute("7 8[BLEND_SEP]9[BLEND_SEP]7") == 1
            with pytest.raises(ValueError, match="give a tokenizer's input_ids, or the text"):
                one.generate(given("7 8"))
            assert is_exact(one, [*first, DOCUMENTS[0]])  # nothing before the last segment but <s>


def test_only_a_questions_last_tokens_are_asked(model):
    (long,) = random_tokens(200, seed=5)
    with blended(model, selection=MostAttended(0.2)) as one:
        packed = one.prefill([[*DOCUMENTS, long], PROMPT, [long]])
        for prompt, found in zip(([*DOCUMENTS, long], PROMPT, [long]), packed, strict=True):
            assert torch.allclose(found.logits, one.prefill([prompt])[0].logits, atol=1e-3)


def test_a_selection_in_the_last_layer_is_refused(model):
    with engine_for(model) as engine:
        for layer in (3, 7):
            with pytest.raises(ValueError, match=f"layer {layer} leaves none of 4 to save"):
                BlendedModel(model, engine, selection=LargestDeviation(0.15, layer))


def test_a_selection_may_read_attention_and_a_layer(model):
    seen = []

    class Both(LargestDeviation):
        reads_attention = True

        def score(self, tokens):
            seen.append((tokens.attention, tokens.deviation))
            return super().score(tokens)

    with blended(model, selection=Both(1.0)) as one:
        assert not is_exact(one, PROMPT)
    (attention, deviation), *_ = seen
    assert attention.shape == deviation.shape == (sum(map(len, PROMPT)),)
    assert 0 < attention.max() <= 4  # layers


def test_a_selection_that_is_no_mask_is_refused(model):
    class Indices(Selection):
        def select(self, tokens):
            return torch.arange(len(tokens.is_valid))

    with blended(model, selection=Indices()) as one, pytest.raises(ValueError, match="must be a bool mask"):
        one.generate(PROMPT)


def test_a_selection_of_the_users_own(model):
    class Odd(Selection):
        def select(self, tokens):
            return tokens.original_positions % 2 == 1  # and what is not valid, whatever it says

    with blended(model, selection=Odd()) as one:
        one.precompute(DOCUMENTS)
        assert num_computed(one, PROMPT) == (33 // 2 + 50 // 2) + len(QUESTION)


def test_other_calls_of_the_model_are_as_ever(model):
    expected = model.generate(joined(PROMPT), **GENERATE)
    with blended(model, selection=NoTokens()) as one:
        one.generate(PROMPT, **GENERATE)
        assert torch.equal(model.generate(joined(PROMPT), **GENERATE), expected)
    with engine_for(model) as engine:
        for _ in range(3):  # forgotten ones leave nothing behind
            BlendedModel(model, engine)
    for layer in model.get_decoder().layers:
        assert not layer._forward_pre_hooks
        assert not layer.self_attn._forward_hooks
