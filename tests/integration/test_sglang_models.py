"""SGLang stores and loads windows, states and latent KV. Its answers are those of transformers."""

import pytest
import torch

from testing.engine.tiny_kinds import DEEPSEEK2, LFM2, MELLUM, WINDOW
from testing.sglang.engine import DEEPSEEK2_ARGUMENTS, PAGE_TOKENS, make_prompt, patient_storage
from tests.harness.sglang.world import serving_sidecar, wait_attached

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("one_thread")]

NUM_NEW_TOKENS = 8
LATENTS = DEEPSEEK2, DEEPSEEK2_ARGUMENTS
WINDOWS = MELLUM, {}
STATES = (
    LFM2,
    {
        "environment": {"SGLANG_MAMBA_CONV_DTYPE": "float32"},
        "page_size": 1,
        "mamba_radix_cache_strategy": "no_buffer",
        "max_mamba_cache_size": 64,
    },
)
"""SGLang has snapshots within a prompt on GPUs only. Without them, pages are tokens, and states are those of
the ends of prompts and answers."""


@pytest.fixture
def start(start_sglang):
    """Returns a function that starts an engine of a model. All engines share the sidecar's pages."""
    with serving_sidecar() as sidecar:
        storage = patient_storage(sidecar.socket_path, min_page_tokens=1)

        def run(model, *, attaches_again=False):
            engine = start_sglang(storage, model=model[0].path, **model[1])
            if attaches_again:
                engine.request("POST", "/freeze_gc")
                engine.detach()
                engine.attach(storage)
            wait_attached(engine, sidecar)
            return engine

        yield run


def test_hit_ends_where_a_window_is_stored(start):
    """Only the window at the end of a request is stored, but keys and values of all its tokens are."""
    prompt = make_prompt(750)
    begin, between = prompt[:500], prompt[: 9 * PAGE_TOKENS + 1]
    assert stored_answer(start, WINDOWS, begin, 7 * PAGE_TOKENS) == reference(WINDOWS, begin)
    # After its start, SGLang hides all objects from Python's garbage collector.
    engine = start(WINDOWS, attaches_again=True)
    longer = engine.generate(prompt, NUM_NEW_TOKENS)
    assert (longer.cached["storage"], longer.tokens) == (7 * PAGE_TOKENS, reference(WINDOWS, prompt))
    engine.wait_stored(4 * PAGE_TOKENS)
    engine.flush_cache()
    assert WINDOW == 2 * PAGE_TOKENS
    shorter = engine.generate(between, NUM_NEW_TOKENS)
    assert (shorter.cached["storage"], shorter.tokens) == (7 * PAGE_TOKENS, reference(WINDOWS, between))


def test_hit_ends_where_a_state_is_stored(start):
    prompt = make_prompt(301)  # the one token that the last request computes depends on the state
    begin = prompt[:300]
    stored = stored_answer(start, STATES, begin, len(begin))
    engine = start(STATES)
    same = engine.generate(begin, NUM_NEW_TOKENS)
    assert same.cached["storage"] == 0  # SGLang computes the last token, and the state before it is missing
    assert stored == same.tokens == reference(STATES, begin)
    engine.flush_cache()
    longer = engine.generate(prompt, NUM_NEW_TOKENS)
    assert (longer.cached["storage"], longer.tokens) == (len(begin), reference(STATES, prompt))


def test_hit_ends_at_any_page_of_latents(start):
    prompt = make_prompt(750)
    begin, within = prompt[:500], prompt[:300]
    assert stored_answer(start, LATENTS, begin, 7 * PAGE_TOKENS) == reference(LATENTS, begin)
    engine = start(LATENTS)
    shorter = engine.generate(within, NUM_NEW_TOKENS)
    assert (shorter.cached["storage"], shorter.tokens) == (4 * PAGE_TOKENS, reference(LATENTS, within))
    engine.flush_cache()
    longer = engine.generate(prompt, NUM_NEW_TOKENS)
    assert (longer.cached["storage"], longer.tokens) == (7 * PAGE_TOKENS, reference(LATENTS, prompt))


def stored_answer(start, model, prompt, num_tokens):
    """Run a prompt in an engine of its own. Returns the answer when this many tokens are stored."""
    engine = start(model)
    answer = engine.generate(prompt, NUM_NEW_TOKENS)
    engine.wait_stored(num_tokens)
    engine.kill()
    return answer.tokens


def reference(model, prompt):
    """Return the answer of transformers."""
    from transformers import AutoModelForCausalLM

    kind, _ = model
    transformer = AutoModelForCausalLM.from_pretrained(kind.path, dtype=torch.float32)
    transformer.generation_config.eos_token_id = None  # requests of the tests ignore it, too
    answer = transformer.generate(torch.tensor([prompt]), max_new_tokens=NUM_NEW_TOKENS, do_sample=False)
    return answer[0, len(prompt) :].tolist()
