"""KV blended inside transformers models, compared with the same models without blending."""

import contextlib

import pytest
import torch
from transformers import DynamicCache

from lmcache.blend.selection import AllTokens, FirstTokens, LargestDeviation, MostAttended, NoTokens
from lmcache.huggingface import BlendedModel, CachedModel
from lmcache.huggingface.blended import FAMILIES
from testing.blend.tiny import engine_for, random_tokens, tiny_model

DOCUMENTS = random_tokens(40, 33, 50)
QUESTION = random_tokens(9, seed=1)[0]
PROMPT = [DOCUMENTS[2], DOCUMENTS[0], DOCUMENTS[1], QUESTION]
EVERYTHING = {
    "deviation": LargestDeviation(1.0),
    "deviation-2": LargestDeviation(1.0, layer=2),
    "first": FirstTokens(1.0),
    "attended": MostAttended(1.0),
    "all": AllTokens(),
}


pytestmark = pytest.mark.usefixtures("one_thread")


@contextlib.contextmanager
def blended(model, *tokenizers, selection=None, **options):
    with engine_for(model, **options) as engine:
        blended_model = BlendedModel(model, engine, *tokenizers, selection=selection)
        try:
            yield blended_model
        finally:
            blended_model.close()


def blended_kv(model, selection) -> torch.Tensor:
    """KV of ``PROMPT``, whose documents were stored before."""
    with blended(model, selection=selection) as blended_model:
        blended_model.precompute(PROMPT[:-1])
        return kv_of(blended_model.prefill([PROMPT])[0].cache)


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama")


def joined(prompt) -> torch.Tensor:
    return torch.cat(prompt)[None]


def kv_of(cache) -> torch.Tensor:
    """``[num_layers, 2, num_kv_heads, num_tokens, head_size]``"""
    return torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers])


@torch.no_grad()
def kv_alone(model, tokens, first_position=0, before=()) -> torch.Tensor:
    """KV of tokens that attend only to ``before`` and to one another, rotated by the model itself."""
    cache, everything = DynamicCache(), torch.cat((torch.tensor(before, dtype=torch.long), tokens))
    positions = torch.arange(len(everything)) + first_position - len(before)
    model.get_decoder()(input_ids=everything[None], position_ids=positions[None], past_key_values=cache)
    return kv_of(cache)[..., len(before) :, :]


def kv_of_segments(model, prompt=None) -> torch.Tensor:
    """KV of all segments as they are stored: each begins at the first position, and attends to itself."""
    return torch.cat([kv_alone(model, segment) for segment in prompt or PROMPT], -2)


def is_reused(kv, stored) -> list[bool]:
    """Whether the V of a token, in all layers, is the stored one. The K is rotated."""
    return (kv == stored)[:, 1].all(0).all(0).all(-1).tolist()


@torch.no_grad()
def computed_one_by_one(model, prompt, is_selected) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference implementation: process tokens in order, and compute each one or take its stand-alone KV.

    Returns the KV and the last token's logits.
    """
    reused = torch.cat(
        [
            kv_alone(model, segment, sum(map(len, prompt[:index]))) if index < len(prompt) - 1
            else kv_alone(model, segment)  # computed anyway
            for index, segment in enumerate(prompt)
        ],
        dim=-2,
    )  # fmt: skip
    cache = DynamicCache()
    for index, token in enumerate(torch.cat(prompt)):
        if is_selected[index]:
            output = model(token[None, None], position_ids=torch.tensor([[index]]), past_key_values=cache)
            logits = output.logits[0, -1]
        else:
            for layer, (k, v) in enumerate(reused):
                cache.update(k[None, :, index : index + 1], v[None, :, index : index + 1], layer)
    return kv_of(cache), logits


@pytest.mark.parametrize(
    ("family", "attention"), [*((family, "sdpa") for family in FAMILIES), ("llama", "eager")]
)
def test_recomputing_everything_equals_a_full_prefill_bit_for_bit(family, attention):
    model = tiny_model(family, attention)
    tokens = joined(PROMPT)
    options = {
        "max_new_tokens": 5,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    with torch.no_grad():
        full = model(tokens)
    expected = model.generate(tokens, **options)
    for name, selection in EVERYTHING.items():
        with blended(model, selection=selection) as blended_model:
            assert blended_model.precompute(PROMPT[:-1]) == sum(map(len, PROMPT[:-1]))
            result = blended_model.prefill([PROMPT], len(QUESTION))[0]
            assert torch.equal(result.logits, full.logits[0, -len(QUESTION) :]), name
            assert torch.equal(kv_of(result.cache), kv_of(full.past_key_values)), name
            output = blended_model.generate(PROMPT, **options)
            assert torch.equal(output.sequences, expected.sequences)
            assert all(map(torch.equal, output.logits, expected.logits))
            # The model blended twice: for the prefill and for generate.
            assert blended_model.segments.hit_tokens_count == 2 * sum(map(len, PROMPT[:-1]))


@pytest.mark.parametrize(
    ("family", "attention"), [*((family, "sdpa") for family in FAMILIES), ("llama", "eager")]
)
@pytest.mark.parametrize("selection", [NoTokens(), FirstTokens(0.3)], ids=["none", "first"])
def test_kv_equals_a_reference_that_processes_tokens_in_order(family, attention, selection):
    model = tiny_model(family, attention)
    num_documents = sum(map(len, PROMPT[:-1]))
    num_computed = int(0.3 * num_documents) if isinstance(selection, FirstTokens) else 0
    with blended(model, selection=selection) as blended_model:
        blended_model.precompute(PROMPT[:-1])
        result = blended_model.prefill([PROMPT])[0]
        is_same = is_reused(kv_of(result.cache), kv_of_segments(model))[:num_documents]
        is_selected = [not same for same in is_same] + [True] * len(QUESTION)
        assert sum(is_selected) == num_computed + len(QUESTION)
        kv, logits = computed_one_by_one(model, PROMPT, is_selected)
        assert torch.allclose(kv_of(result.cache), kv, atol=1e-4)
        assert torch.allclose(result.logits[0], logits, atol=1e-3)


def test_first_tokens_selects_an_equal_share_of_each_moved_segment(llama):
    is_same = is_reused(blended_kv(llama, FirstTokens(0.2)), kv_of_segments(llama))
    computed = [index for index, same in enumerate(is_same) if not same]
    # int(0.2 * 123) = 24 tokens, from segments of 40 and 33 tokens behind a segment of 50: equal shares
    expected = [*range(50, 63), *range(90, 101), *range(123, 132)]
    assert computed == expected


def test_largest_deviation_measures_the_configured_layer(llama):
    with torch.no_grad():
        fresh = kv_of(llama(joined(PROMPT)).past_key_values)
    alone = kv_of_segments(llama)
    for layer in (1, 2):
        result = blended_kv(llama, LargestDeviation(0.25, layer))
        assert torch.equal(result[: layer + 1], fresh[: layer + 1])  # computed for all tokens
        num_known = sum(map(len, PROMPT[:-1]))
        deviation = (fresh - alone)[layer, 1].square().mean((0, 2))[:num_known]
        expected = set(deviation.argsort(descending=True)[: int(0.25 * num_known)].tolist())
        is_same = is_reused(result[layer + 1 :][:1], alone[layer + 1 :][:1])[:num_known]
        assert {index for index, same in enumerate(is_same) if not same} == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_most_attended_selects_tokens_by_the_questions_attention(family):
    model = tiny_model(family, "eager")  # this implementation returns its attention weights
    num_known = sum(map(len, PROMPT[:-1]))
    cache = DynamicCache()
    for index, segment in enumerate(PROMPT[:-1]):
        for layer, (k, v) in enumerate(kv_alone(model, segment, sum(map(len, PROMPT[:index])))):
            cache.update(k[None], v[None], layer)
    with torch.no_grad():
        positions = num_known + torch.arange(len(QUESTION))[None]
        output = model(QUESTION[None], position_ids=positions, past_key_values=cache, output_attentions=True)
    attention = torch.cat(output.attentions).amax((1, 2)).sum(0)[:num_known]
    attention[: len(PROMPT[0])] = 0  # the first segment stands at its stored position
    expected = set(attention.argsort(descending=True)[: int(0.25 * num_known)].tolist())
    result = blended_kv(model, MostAttended(0.25))
    is_same = is_reused(result, kv_of_segments(model))
    assert {index for index, same in enumerate(is_same[:num_known]) if not same} == expected
    is_selected = [index in expected or index >= num_known for index in range(len(is_same))]
    kv, _ = computed_one_by_one(model, PROMPT, is_selected)
    assert torch.allclose(result, kv, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_blend_within_rounding(dtype):
    model = tiny_model("llama").to(dtype)
    with blended(model, selection=AllTokens()) as blended_model, torch.no_grad():
        full = model(joined(PROMPT), logits_to_keep=1).logits[0]
        assert torch.equal(blended_model.prefill([PROMPT])[0].logits, full)
    result = blended_kv(model, NoTokens()).float()
    start = len(PROMPT[0])
    moved = kv_alone(model, PROMPT[1], start).float()
    difference = (result[..., start : start + len(PROMPT[1]), :] - moved)[0].abs().max()
    assert difference <= 4 * torch.finfo(dtype).eps * moved[0].abs().max()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_moved_segments_follow_scaled_rotary_embeddings(rope):
    model = tiny_model("llama", rope_parameters={"rope_theta": 10_000.0, **rope})
    result = blended_kv(model, NoTokens())
    start = len(PROMPT[0])
    moved = kv_alone(model, PROMPT[1], start)
    assert torch.allclose(result[..., start : start + len(PROMPT[1]), :], moved, atol=1e-4)


@pytest.mark.parametrize(
    "selection", [LargestDeviation(0.2), FirstTokens(0.2), MostAttended(0.2), NoTokens()]
)
def test_packed_prompts_do_not_affect_one_another(llama, selection):
    second_prompt = [DOCUMENTS[0], DOCUMENTS[0], QUESTION]  # the same document twice
    third_prompt = [*DOCUMENTS, *random_tokens(200, seed=5)]  # a long question
    prompts = [PROMPT, second_prompt, [QUESTION], third_prompt]
    with blended(llama, selection=selection) as blended_model:
        blended_model.precompute(DOCUMENTS)
        alone = [blended_model.prefill([prompt])[0] for prompt in prompts]
        packed = blended_model.prefill(prompts)
    for expected, result in zip(alone, packed, strict=True):
        assert torch.allclose(expected.logits, result.logits, atol=1e-3)
        assert torch.allclose(kv_of(expected.cache), kv_of(result.cache), atol=1e-3)


def test_generation_continues_from_a_prefill(llama):
    tokens = joined(PROMPT)
    with blended(llama, selection=LargestDeviation(0.5)) as blended_model:
        blended_model.precompute(DOCUMENTS)
        expected = blended_model.generate(PROMPT, max_new_tokens=4, do_sample=False)
        cache = blended_model.prefill([PROMPT])[0].cache
        assert type(cache.layers[0]).__name__ == "DynamicLayer"
        cache.crop(-1)
        assert torch.equal(
            llama.generate(tokens, past_key_values=cache, max_new_tokens=4, do_sample=False), expected
        )


def test_exact_lookups_never_find_approximate_kv(llama):
    with blended(llama, selection=NoTokens(), save_decode_cache=True) as blended_model:
        output = blended_model.generate(PROMPT, max_new_tokens=2 * 16, do_sample=False)[0]
        assert blended_model.segments.lookup(DOCUMENTS[0]) == len(DOCUMENTS[0])
        for tokens in (*DOCUMENTS, joined(PROMPT)[0], output, QUESTION, *DOCUMENTS[0].split(16)):
            assert blended_model.engine.lookup(tokens) == 0
        cached = CachedModel(llama, blended_model.engine)
        for prompt in ([DOCUMENTS[0], QUESTION], PROMPT):
            result = cached.generate(joined(prompt), max_new_tokens=4, do_sample=False)
            assert torch.equal(result, llama.generate(joined(prompt), max_new_tokens=4, do_sample=False))
        assert blended_model.engine.hit_tokens_count == 0
        # A segment's lookup does not find KV that was computed behind other segments.
        assert blended_model.segments.lookup(joined(PROMPT)[0]) == len(DOCUMENTS[2]) // 16 * 16
