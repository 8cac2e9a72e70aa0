"""SGLang servers with a sidecar: what they load, and that loaded KV gives the answers of computed KV."""

import json

import pytest

from testing.sglang.engine import PAGE_TOKENS
from tests.harness.sglang.world import (
    attached,
    full_pages,
    generate,
    generate_all,
    load,
    new_prompt,
    store,
    wait_attached,
)

pytestmark = [pytest.mark.sglang, pytest.mark.redis]

NUM_TOKENS = 1030
HIT = full_pages(NUM_TOKENS)


@pytest.fixture(params=["sglang_engine", "sglang_buffered"])
def engine(request):
    return request.getfixturevalue(request.param)


def test_a_prompt_is_loaded_after_sglang_empties_its_own_caches(engine, sglang):
    prompt = new_prompt(NUM_TOKENS)
    (cold,) = store(engine, prompt)
    again = generate(engine, prompt)
    loaded = load(engine, prompt)
    assert cold.cached == {"device": 0, "host": 0, "storage": 0}
    assert again.cached == {"device": HIT, "host": 0, "storage": 0}
    assert loaded.cached == {"device": 0, "host": 0, "storage": HIT}
    for answer in (cold, again, loaded):
        sglang.expected.check(prompt, answer)
    assert sglang.sidecar.stats()["lookups"]["computes_on_cpu"]


def test_wrong_kv_changes_the_answers(sglang_engine, sglang):
    """A proof that the comparisons of these tests notice one wrong page."""
    storage = sglang.storage
    storage.extra_config.update(module_path="tests.harness.sglang.mixed_up", class_name="MixedUpPages")
    prompt = new_prompt(NUM_TOKENS)
    with attached(sglang_engine, sglang.sidecar, storage):
        store(sglang_engine, prompt)
        wrong = load(sglang_engine, prompt)
    assert wrong.cached["storage"] == HIT
    assert wrong.tokens != sglang.expected(prompt).tokens


def test_requests_with_another_salt_or_key_share_nothing(sglang_engine, sglang):
    prompt = new_prompt(NUM_TOKENS)
    names = "cache_salt", "extra_key"
    requests = [{}, *({name: "a"} for name in names)]
    for fields in requests:
        (answer,) = store(sglang_engine, prompt, **fields)
        assert answer.num_cached_tokens == 0
    sglang_engine.flush_cache()
    for name in names:
        assert generate(sglang_engine, prompt, **{name: "b"}).num_cached_tokens == 0
    for fields in requests:
        answer = generate(sglang_engine, prompt, **fields)
        assert answer.cached["storage"] == HIT
        sglang.expected.check(prompt, answer)


def test_the_next_turn_loads_prompt_and_answer_of_the_turn_before(sglang_engine, sglang_buffered, sglang):
    prompt, num_answer_tokens = new_prompt(NUM_TOKENS), 150
    before = sglang_engine.num_stored_tokens()
    turn = sglang_engine.generate(prompt, num_answer_tokens)
    num_computed = NUM_TOKENS + num_answer_tokens - 1  # the KV of an answer's last token is never computed
    num_pages = num_computed // PAGE_TOKENS
    assert num_pages > NUM_TOKENS // PAGE_TOKENS
    sglang_engine.wait_stored(before + num_pages * PAGE_TOKENS)
    next_prompt = prompt + turn.tokens + new_prompt(200)
    answer = generate(sglang_buffered, next_prompt)
    assert answer.cached["storage"] == num_pages * PAGE_TOKENS
    sglang.expected.check(next_prompt, answer)


@pytest.mark.parametrize("policy", ["best_effort", "timeout"])
def test_prefetch_policies_of_sglang(policy, sglang_engine, sglang):
    """SGLang computes what a policy does not wait for. The answers are those of ``wait_complete``."""
    prompts = [new_prompt(NUM_TOKENS), new_prompt(NUM_TOKENS)]
    with attached(sglang_engine, sglang.sidecar, sglang.storage, policy):
        store(sglang_engine, *prompts)
        sglang_engine.flush_cache()
        answers = generate_all(sglang_engine, prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        sglang.expected.check(prompt, answer)
        assert answer.cached["storage"] in ((HIT,) if policy == "timeout" else range(HIT + 1))


def test_a_sidecar_without_its_memory_serves_hits_from_disk(sglang_engine, sglang):
    prompt = new_prompt(NUM_TOKENS)
    store(sglang_engine, prompt)
    sglang.sidecar.settled()
    sglang.forget_memory()
    wait_attached(sglang_engine, sglang.sidecar)
    answer = load(sglang_engine, prompt)
    assert answer.cached["storage"] == HIT
    sglang.expected.check(prompt, answer)
    sglang.sidecar.wait_until(lambda stats: stats["causes"]["cause_tokens"].get("disk") == HIT)
    (request, *_) = json.loads(sglang.sidecar.get("/requests"))["requests"]
    assert request["tokens"] == {"disk": HIT, "tail": NUM_TOKENS - HIT}
    assert request["load_seconds"]["disk"] > 0
