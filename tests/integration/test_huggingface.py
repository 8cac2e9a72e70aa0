"""Generation with stored prompts gives the same answers as without. The model is a small random Llama."""

import contextlib
import logging

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from lmcache.cache_engine import LMCacheEngine
from lmcache.config import LMCacheEngineConfig
from lmcache.huggingface import CachedModel, metadata_of

CHUNK = 16
SIZES = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,  # so that answers depend on the prompt
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


@contextlib.contextmanager
def engine_of(model, **options):
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK,
        local_device="cpu",
        remote_url=None,
        remote_serde=None,
        max_local_cache_size=0.01,
        **options,
    )
    engine = LMCacheEngine(config, metadata_of(model, "tiny", CHUNK))
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture
def engine(model):
    with engine_of(model) as engine:
        yield engine


@pytest.fixture
def computed(model):
    """The number of tokens that each forward pass computed."""
    lengths: list[int] = []
    hook = model.model.embed_tokens.register_forward_hook(
        lambda _, args, __: lengths.append(args[0].shape[1])
    )
    yield lengths
    hook.remove()


def prompt(num_tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 200, (1, num_tokens), generator=torch.Generator().manual_seed(seed))


GREEDY = {"do_sample": False, "max_new_tokens": 12}


@pytest.mark.parametrize("num_tokens", [1, 2, CHUNK, CHUNK + 1, 40, 3 * CHUNK])
def test_hits_give_the_same_answer_as_cold_runs(model, engine, computed, num_tokens):
    cached = CachedModel(model, engine)
    expected = model.generate(prompt(num_tokens), **GREEDY)
    for num_computed in (num_tokens, 1, 1):  # at least the last token is computed
        computed.clear()
        assert torch.equal(cached.generate(prompt(num_tokens), **GREEDY), expected)
        assert computed[0] == num_computed


def test_partial_hit_computes_the_remaining_tokens(model, engine, computed):
    cached = CachedModel(model, engine)
    longer = torch.cat((prompt(40)[:, : 2 * CHUNK], prompt(30, seed=1)), dim=1)
    expected = model.generate(longer, **GREEDY)
    cached.generate(prompt(40), **GREEDY)
    computed.clear()
    answer = cached.generate(
        longer, attention_mask=torch.ones_like(longer), return_dict_in_generate=True, **GREEDY
    )
    assert torch.equal(answer.sequences, expected)
    assert computed[0] == 30
    assert engine.lookup(longer[0]) == 62


def test_stored_kv_is_what_the_model_computes(model, engine):
    CachedModel(model, engine).generate(prompt(40), **GREEDY)
    kv, is_retrieved = engine.retrieve(prompt(40)[0])
    assert is_retrieved.all()
    with torch.no_grad():
        layers = model(prompt(40), use_cache=True).past_key_values.layers
    for layer, (k, v) in zip(layers, kv, strict=True):
        assert torch.allclose(k, layer.keys[0], atol=1e-5)
        assert torch.allclose(v, layer.values[0], atol=1e-5)


def test_generated_tokens_are_stored_with_save_decode_cache(model, computed):
    with engine_of(model, save_decode_cache=True) as engine:
        cached = CachedModel(model, engine)
        turn = cached.generate(prompt(40), **GREEDY)
        computed.clear()
        assert torch.equal(cached.generate(turn, **GREEDY), model.generate(turn, **GREEDY))
        assert computed[0] == turn.shape[1] % CHUNK  # the tail chunk is not stored


@pytest.mark.parametrize("broken", ["retrieve", "store"])
def test_cache_faults_do_not_change_the_answer(model, engine, broken, monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise OSError("the storage is unavailable")

    cached = CachedModel(model, engine)
    monkeypatch.setattr(engine, broken, fail)
    monkeypatch.setattr(logging.getLogger("lmcache.huggingface"), "propagate", True)
    for _ in range(2):
        assert torch.equal(cached.generate(prompt(40), **GREEDY), model.generate(prompt(40), **GREEDY))
    assert "the storage is unavailable" in caplog.text


@pytest.mark.parametrize(
    ("inputs", "arguments"),
    [
        (torch.cat((prompt(20), prompt(20, seed=1))), {}),
        (prompt(20), {"num_beams": 2}),
        (prompt(20), {"do_sample": True, "num_return_sequences": 2}),
        (prompt(20), {"use_cache": False}),
        (prompt(20), {"cache_implementation": "static"}),
        (prompt(20), {"prompt_lookup_num_tokens": 2}),
        (prompt(20), {"assistant_early_exit": 1}),
        (prompt(20), {"attention_mask": torch.arange(20)[None] > 3}),
        (torch.nn.functional.pad(prompt(20), (3, 0)), {}),
        (prompt(20), {"position_ids": torch.arange(5, 25)[None]}),
    ],
    ids=[
        *("batch", "beams", "sequences", "no-cache", "static", "assisted", "early-exit"),
        *("mask", "padding", "positions"),
    ],
)
def test_unsupported_calls_run_without_the_cache(model, engine, inputs, arguments):
    def answer(run):
        torch.manual_seed(0)
        return run(inputs, **(GREEDY | arguments))

    assert torch.equal(answer(CachedModel(model, engine).generate), answer(model.generate))
    assert engine.lookup(inputs[0]) == 0


def test_end_token_in_the_prompt_that_also_pads_keeps_the_hit(model, engine):
    """Chats end their turns with the token that also pads."""
    tokens = prompt(40)
    tokens[0, 20] = 7
    for ends in ([7, 9], 7, torch.tensor([7, 9])):
        arguments = GREEDY | {"pad_token_id": 7, "eos_token_id": ends}
        expected = model.generate(tokens, **arguments)
        assert torch.equal(CachedModel(model, engine).generate(tokens, **arguments), expected)
    assert engine.hit_tokens_count == 40


def test_sliding_window_models_run_without_the_cache():
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)).eval()
    with engine_of(model) as engine:
        answer = CachedModel(model, engine).generate(prompt(40), **GREEDY)
        assert torch.equal(answer, model.generate(prompt(40), **GREEDY))
        assert engine.lookup(prompt(40)[0]) == 0


def test_engine_of_another_model_is_refused(model, engine):
    engine.metadata.kv_shape = (5, 2, CHUNK, 2, 16)
    with pytest.raises(ValueError, match="does not fit the model"):
        CachedModel(model, engine)
