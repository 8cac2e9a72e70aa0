"""Counts of the sidecar below an SGLang server, compared with what SGLang counts itself."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from testing.child_process import wait_until
from testing.processes import RedisProcess
from testing.sglang.engine import PAGE_TOKENS, lmcache_storage, make_prompt
from tests.harness.sglang_world import (
    full_pages,
    generate,
    generate_all,
    serving,
    serving_sidecar,
    store,
    wait_attached,
)

pytestmark = [pytest.mark.sglang, pytest.mark.redis]

NUM_TOKENS = 2048
HIT = full_pages(NUM_TOKENS)
PREFIX = 960
"""Tokens of full pages that two prompts share."""
LOADED = PREFIX + HIT + full_pages(9000) + HIT
"""Tokens that the engine loads from the sidecar in ``run_prompts``."""


def counts(sidecar, engine):
    """Return what sidecar and engine have counted: tokens by cause, by tier, and by SGLang's source."""
    stats = sidecar.stats()
    cached = Counter()
    for line in engine.metrics_text().splitlines():
        if line.startswith("sglang:cached_tokens_total{"):
            cached[line.partition('cache_source="')[2].partition('"')[0]] += int(float(line.split()[-1]))
    return (
        Counter(stats["causes"]["cause_tokens"]),
        Counter({"prompt": stats["causes"]["prompt_tokens"], "lookup": stats["lookups"]["lookup_tokens"]}),
        Counter(stats["lookups"]["hit_tokens"]),
        Counter(stats["lookups"]["loaded_tokens"]),
        cached,
        Counter(prompt=int(engine.metrics("sglang:prompt_tokens_total")["sglang:prompt_tokens_total"])),
    )


def wait_counted(engine, sidecar, num_tokens):
    """Run a prompt of a length that no other prompt has, and wait until the sidecar has counted it.

    The engine reports its requests in order. Returns the length.
    """
    generate(engine, make_prompt(num_tokens))

    def is_newest() -> bool:
        (newest, *_) = json.loads(sidecar.get("/requests"))["requests"]
        return sum(newest["tokens"].values()) == num_tokens

    wait_until(is_newest)
    return num_tokens


def run_prompts(engine, number):
    """Run a prompt, one that begins alike, and a long one, repeatedly. Returns the first, and all answers."""
    prompt = make_prompt(NUM_TOKENS, f"counts {number}")
    branch = prompt[: PREFIX + 10] + make_prompt(NUM_TOKENS - PREFIX - 10, f"branch {number}")
    # SGLang looks it up in two calls, and computes it in three parts.
    long_prompt = make_prompt(9000, f"long {number}")
    answers = store(engine, prompt)
    answers.append(generate(engine, prompt))
    for prompts in ([branch], [prompt], [long_prompt], [long_prompt, branch]):
        engine.flush_cache()
        answers += generate_all(engine, prompts)
    engine.flush_cache()
    return prompt, answers


def test_sidecar_and_sglang_count_the_same_tokens(tmp_path):
    with (
        RedisProcess() as redis,
        serving_sidecar(remote_url=redis.url) as sidecar,
        serving(tmp_path, lmcache_storage(sidecar.socket_path)) as engine,
    ):
        wait_attached(engine, sidecar)
        engine_tokens = loaded_tokens = 0
        # A call that is not answered in time, as on a busy machine, gives a miss. Then other prompts run.
        for number in range(3):
            wait_counted(engine, sidecar, 101 + number)
            before = counts(sidecar, engine)
            prompt, answers = run_prompts(engine, number)
            engine_tokens = sum(answer.cached["device"] + answer.cached["host"] for answer in answers)
            loaded_tokens = sum(answer.cached["storage"] for answer in answers)
            if loaded_tokens == LOADED:
                break
        assert (engine_tokens, loaded_tokens) == (HIT, LOADED)
        lengths = [answer.meta["prompt_tokens"] for answer in answers]
        lengths.append(wait_counted(engine, sidecar, 104))
        after = counts(sidecar, engine)
        causes, total, hits, loads, by_source, by_sglang = (
            new - old for new, old in zip(after, before, strict=True)
        )
        assert total == {"prompt": sum(lengths), "lookup": sum(map(full_pages, lengths))}
        assert by_sglang == {"prompt": sum(lengths)}
        assert by_source == {"device": engine_tokens, "storage": loaded_tokens}
        assert hits == {"engine": engine_tokens, "memory": loaded_tokens}
        assert loads == {"memory": loaded_tokens}
        assert causes == {
            "engine": engine_tokens,
            "memory": loaded_tokens,
            "new": HIT + full_pages(9000) + PAGE_TOKENS,
            "diverged": HIT - PREFIX,
            "tail": sum(lengths) - sum(map(full_pages, lengths)),
        }

        sidecar.wait_until(lambda stats: stats["num_unwritten_rows"] == 0)
        sidecar.kill()
        sidecar.arena_path.unlink()
        sidecar.start()
        wait_attached(engine, sidecar)
        answer = generate(engine, prompt)
        assert answer.cached["storage"] == HIT
        sidecar.wait_until(lambda stats: stats["causes"]["cause_tokens"].get("remote") == HIT)
        (request, *_) = json.loads(sidecar.get("/requests"))["requests"]
        assert request["tokens"] == {"remote": HIT, "tail": PAGE_TOKENS}
        assert request["load_seconds"]["remote"] > 0
