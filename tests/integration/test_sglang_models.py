"""SGLang stores and loads windows, states and latent KV, with this project's backend and with its own.

SGLang's backend ``file`` shows that SGLang computes these models on a CPU as transformers does, and which
part of a prompt a storage backend can serve. This project's backend must serve the same part.
"""

import contextlib
import json

import pytest
import torch

from testing.engine.tiny_kinds import DEEPSEEK2, LFM2, MELLUM, WINDOW
from testing.sglang.engine import DEEPSEEK2_ARGUMENTS, PAGE_TOKENS, file_storage, make_prompt, patient_storage
from testing.sglang.program import Program
from tests.harness.sglang_world import serving_sidecar, wait_attached

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("one_thread")]

NUM_NEW_TOKENS = 8
POOLS = ("kv", "swa"), ("kv", "mamba"), ("kv", "indexer")
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


@pytest.fixture(params=["lmcache", pytest.param("file", marks=pytest.mark.rotating)])
def start(request, start_sglang, tmp_path):
    """Returns a function that starts an engine of a model. All engines share the stored pages."""
    with contextlib.ExitStack() as stack:
        if is_file := request.param == "file":
            storage = file_storage(tmp_path / "pages")
        else:
            sidecar = stack.enter_context(serving_sidecar())
            storage = patient_storage(sidecar.socket_path, min_page_tokens=1)

        def run(model, *, attaches_again=False):
            engine = start_sglang(storage, model=model[0].path, **model[1])
            if attaches_again:
                engine.request("POST", "/freeze_gc")
                engine.detach()
                engine.attach(storage)
            if not is_file:
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


def test_pools_without_an_engine(tmp_path):
    """The pools of the harness are SGLang's, also those of models that need a GPU."""
    arguments = [str(tmp_path)]
    with Program("the pools", tmp_path / "log", "tests.harness.sglang_hybrid_pools", arguments) as program:
        outcomes = json.loads(program.finish().splitlines()[-1])
    windowed, stateful, indexed = (dict.fromkeys(names, True) for names in POOLS)
    direct, tokens, layers = "page_first_direct", "page_first", "layer_first"
    assert outcomes == {
        **{f"windowed-{layout}": windowed for layout in (direct, tokens, layers)},
        **{f"stateful-{layout}": stateful for layout in (direct, tokens)},
        **{f"indexed-{layout}": indexed for layout in (direct, tokens, layers)},
    }


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
