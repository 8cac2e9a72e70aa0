"""SGLang servers with a sidecar: what they load, and that loaded KV gives the answers of computed KV."""

from __future__ import annotations

import itertools

import pytest

from testing.processes import RedisProcess
from testing.sglang.engine import PAGE_TOKENS, lmcache_storage, make_prompt
from tests.harness.sglang_world import (
    full_pages,
    generate,
    generate_all,
    reference,
    serving,
    serving_sidecar,
    store,
    wait_attached,
)

pytestmark = [pytest.mark.sglang, pytest.mark.redis]

NUM_TOKENS = 2048
LENGTHS = 65, 128, 129, 1000, 1024, 1500, 3000, 4100
"""Lengths of prompts that run at once: a page and a token, and numbers of pages with and without a rest."""
_seeds = itertools.count()


def new_prompt(num_tokens=NUM_TOKENS):
    return make_prompt(num_tokens, f"test_sglang {next(_seeds)}")


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def redis():
    with RedisProcess() as server:
        yield server


@pytest.fixture(scope="module")
def sidecar(redis, logs):
    with serving_sidecar(remote_url=redis.url, disk_path=logs / "disk", disk_size="1Gi") as process:
        yield process


@pytest.fixture(scope="module")
def expected(logs):
    with reference(logs) as engine:
        yield engine


@pytest.fixture(scope="module")
def first(sidecar, logs):
    with serving(logs, lmcache_storage(sidecar.socket_path)) as engine:
        wait_attached(engine, sidecar)
        yield engine


@pytest.fixture(scope="module")
def second(sidecar, logs):
    """An engine that runs two requests at once. The others are queued."""
    with serving(logs, lmcache_storage(sidecar.socket_path), max_running_requests=2) as engine:
        wait_attached(engine, sidecar)
        yield engine


@pytest.fixture(scope="module")
def buffered(sidecar, logs):
    """An engine whose host memory is only a buffer of 4,096 tokens."""
    storage = lmcache_storage(sidecar.socket_path)
    with serving(logs, storage, hicache_host_memory_mode="buffer_only", hicache_ratio=0.25) as engine:
        wait_attached(engine, sidecar)
        yield engine


@pytest.fixture(params=["first", "buffered"])
def engine(request):
    return request.getfixturevalue(request.param)


def test_a_prompt_is_loaded_after_sglang_empties_its_own_caches(engine, expected):
    prompt = new_prompt()
    (cold,) = store(engine, prompt)
    again = generate(engine, prompt)
    engine.flush_cache()
    loaded = generate(engine, prompt)
    assert cold.cached == {"device": 0, "host": 0, "storage": 0}
    assert again.cached == {"device": full_pages(NUM_TOKENS), "host": 0, "storage": 0}
    assert loaded.cached == {"device": 0, "host": 0, "storage": full_pages(NUM_TOKENS)}
    for answer in (cold, again, loaded):
        expected.check(prompt, answer)


def test_wrong_kv_changes_the_answers(sidecar, expected, logs):
    """A proof that the comparisons of this file notice one wrong page."""
    storage = lmcache_storage(sidecar.socket_path)
    storage.extra_config.update(module_path="tests.harness.sglang_mixed_up", class_name="MixedUpPages")
    prompt = new_prompt()
    with serving(logs, storage) as engine:
        wait_attached(engine, sidecar)
        store(engine, prompt)
        engine.flush_cache()
        wrong = generate(engine, prompt)
    assert wrong.cached["storage"] == full_pages(NUM_TOKENS)
    assert wrong.tokens != expected(prompt).tokens


@pytest.mark.parametrize("name", ["cache_salt", "extra_key"])
def test_requests_with_another_salt_or_key_share_nothing(name, first, expected):
    prompt = new_prompt()
    store(first, prompt)
    store(first, prompt, **{name: "a"})
    first.flush_cache()
    other = generate(first, prompt, **{name: "b"})
    assert other.num_cached_tokens == 0
    for fields in ({}, {name: "a"}):
        answer = generate(first, prompt, **fields)
        assert answer.cached["storage"] == full_pages(NUM_TOKENS)
        expected.check(prompt, answer)


@pytest.mark.parametrize("name", ["second", "buffered"])
def test_prompts_that_run_at_once_are_loaded_by_another_engine(name, request, first, expected):
    engine = request.getfixturevalue(name)
    prompts = [new_prompt(length) for length in LENGTHS]
    first.flush_cache()  # SGLang does not store pages for which its host cache has no room at the moment
    store(first, *prompts)
    answers = generate_all(engine, prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.cached["storage"] in (full_pages(len(prompt)), 0)
        expected.check(prompt, answer)
    # SGLang does not ask the storage for a prompt while its host memory is nearly full.
    num_hits = sum(answer.cached["storage"] for answer in answers)
    assert num_hits >= 0.95 * sum(map(full_pages, LENGTHS))


@pytest.mark.parametrize("name", ["second", "buffered"])
def test_the_next_turn_loads_prompt_and_answer_of_the_turn_before(name, request, first, expected):
    engine = request.getfixturevalue(name)
    prompt = new_prompt(1000)
    num_answer_tokens = 600
    before = first.num_stored_tokens()
    turn = first.generate(prompt, num_answer_tokens)
    num_computed = 1000 + num_answer_tokens - 1  # the KV of an answer's last token is never computed
    first.wait_stored(before + num_computed // PAGE_TOKENS * PAGE_TOKENS)
    next_prompt = prompt + turn.tokens + new_prompt(200)
    answer = generate(engine, next_prompt)
    assert answer.cached["storage"] == num_computed // PAGE_TOKENS * PAGE_TOKENS
    expected.check(next_prompt, answer)


def test_the_prefetch_policies_of_sglang(engine, sidecar, expected):
    """SGLang computes what a policy does not wait for. The answers are the same."""
    for policy in ("best_effort", "timeout", "wait_complete"):
        engine.flush_cache()  # SGLang refuses to detach while it stores
        engine.detach()
        engine.attach(lmcache_storage(sidecar.socket_path), policy)
        wait_attached(engine, sidecar)
        prompts = [new_prompt(), new_prompt()]
        store(engine, *prompts)
        engine.flush_cache()
        answers = generate_all(engine, prompts)
        for prompt, answer in zip(prompts, answers, strict=True):
            expected.check(prompt, answer)
            if policy != "best_effort":
                assert answer.cached["storage"] == full_pages(NUM_TOKENS), policy


def test_a_killed_engine_starts_again_with_hits_from_redis(sidecar, redis, expected, logs):
    """The new engine has a new sidecar, as after the loss of a node."""
    prompt = new_prompt()
    with serving(logs, lmcache_storage(sidecar.socket_path)) as engine:
        wait_attached(engine, sidecar)
        store(engine, prompt)
        engine.kill()
    wait_written(sidecar)
    with (
        serving_sidecar(remote_url=redis.url) as new_sidecar,
        serving(logs, lmcache_storage(new_sidecar.socket_path)) as engine,
    ):
        wait_attached(engine, new_sidecar)
        answer = generate(engine, prompt)
        assert answer.cached["storage"] == full_pages(NUM_TOKENS)
        expected.check(prompt, answer)
        new_sidecar.wait_until(lambda stats: loaded_tokens(stats) == {"remote": full_pages(NUM_TOKENS)})


def test_a_sidecar_without_its_memory_serves_hits_from_disk(sidecar, first, expected):
    prompt = new_prompt()
    store(first, prompt)
    wait_written(sidecar)
    sidecar.kill()
    sidecar.arena_path.unlink()
    remote_url = sidecar.options.pop("remote_url")
    sidecar.start()
    wait_attached(first, sidecar)
    first.flush_cache()
    answer = generate(first, prompt)
    assert answer.cached["storage"] == full_pages(NUM_TOKENS)
    expected.check(prompt, answer)
    sidecar.wait_until(lambda stats: loaded_tokens(stats) == {"disk": full_pages(NUM_TOKENS)})
    sidecar.options["remote_url"] = remote_url
    sidecar.restart()
    wait_attached(first, sidecar)


def wait_written(sidecar):
    """Wait until disk and Redis have all rows of the memory."""
    sidecar.wait_until(lambda stats: stats["num_unwritten_rows"] == 0)


def loaded_tokens(stats):
    return stats.get("lookups", {}).get("loaded_tokens")
