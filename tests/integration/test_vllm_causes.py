"""Causes of computed tokens, as a sidecar counts them for engines under vLLM's scheduler."""

import re
import threading

import pytest
from vllm.lora.request import LoRARequest

from lmcache_store.explain.findings import findings
from testing.deadlines import CALLS
from testing.processes import RedisProcess, SidecarProcess
from tests.harness.commands.sidecar_command import explain
from tests.harness.sim.config import CHUNK, SimSettings
from tests.harness.sim.world import make_tokens, only_engine, world

DEADLINES = CALLS

__all__ = ["world"]

pytestmark = pytest.mark.vllm

SETTINGS = SimSettings(num_blocks=256)
BLOCK = SETTINGS.groups[0].block_tokens


class Difference:
    """Causes of what engines computed since it was made."""

    def __init__(self, sidecar: SidecarProcess) -> None:
        self.sidecar = sidecar
        self._before = sidecar.stats()["causes"]

    def tokens(self, num_tokens: int) -> dict[str, int]:
        """Tokens by cause, once the sidecar knows of ``num_tokens``."""
        end = self._before["prompt_tokens"] + num_tokens
        self.sidecar.wait_until(lambda stats: stats["causes"]["prompt_tokens"] >= end)
        after, before = self.sidecar.stats()["causes"], self._before["cause_tokens"]
        assert after["prompt_tokens"] == end
        difference = {cause: n - before.get(cause, 0) for cause, n in after["cause_tokens"].items()}
        return {cause: number for cause, number in difference.items() if number}


def causes_of(sidecar, engine, *prompts) -> dict[str, int]:
    wait_reported(engine)
    difference = Difference(sidecar)
    for prompt in prompts:
        engine.serve(prompt)
    return difference.tokens(sum(map(len, prompts)))


def wait_reported(engine) -> None:
    """Wait until the sidecar has all reports of the engine."""
    done, lookups = threading.Event(), engine.scheduler.connector._scheduler._lookups
    lookups._queue.put(lookups._send_times)  # the causes of loads follow with the requests' times
    lookups._queue.put(done.set)
    assert done.wait(60)


def test_first_prompt_is_new_and_the_second_a_hit(world):
    prompt = make_tokens(4 * CHUNK + 7)
    with world.engines(SETTINGS) as (engine,):
        assert causes_of(world.sidecar, engine, prompt) == {"new": 4 * CHUNK, "tail": 7}
        assert causes_of(world.sidecar, engine, prompt) == {"memory": 4 * CHUNK, "tail": 7}


def test_timestamp_at_token_40_is_a_divergence_in_the_first_64_tokens(world):
    prompt = make_tokens(3 * CHUNK + 1)
    with world.engines(SETTINGS) as (engine,):
        stamped = [[*prompt[:40], *make_tokens(8), *prompt[48:]] for _ in range(5)]
        causes = causes_of(world.sidecar, engine, *stamped)
        stats = world.sidecar.stats()["causes"]
    assert causes == {"new": 3 * CHUNK, "diverged": 4 * 3 * CHUNK, "tail": 5}
    assert stats["diverged_requests"]["64"] >= 4
    (largest, *_) = stats["branches"]
    assert largest["depth_tokens"] == 40 // BLOCK * BLOCK
    assert largest["num_tokens"] == 4 * 3 * CHUNK


def test_chunks_that_another_engine_computes_are_being_stored(world):
    prompt = make_tokens(8 * CHUNK + 1)
    slow = SimSettings(num_blocks=256, max_num_batched_tokens=CHUNK // 2)
    with world.engines(slow, SETTINGS) as (first, second):
        wait_reported(first)
        wait_reported(second)
        difference = Difference(world.sidecar)
        name = first.add(prompt)
        first.step()
        wait_reported(first)
        other = second.add(prompt)
        second.step()
        wait_reported(second)
        assert difference.tokens(2 * len(prompt)) == {
            "new": 8 * CHUNK, "being_stored": 8 * CHUNK, "tail": 2,
        }  # fmt: skip
        first.run(name)
        second.run(other)
        first.run()
        second.run()


def test_prompts_larger_than_the_cache_are_evicted():
    prompts = [make_tokens(8 * CHUNK + 1) for _ in range(60)]
    with only_engine(SETTINGS, memory_size="4Mi") as (sidecar, engine):
        causes_of(sidecar, engine, *prompts)
        num_rows = sidecar.stats()["memory"]["usable_rows"]
        more = [make_tokens(8 * CHUNK + 1) for _ in range(num_rows // 8)]
        causes_of(sidecar, engine, *more)
        again = causes_of(sidecar, engine, *prompts)
        causes_of(sidecar, engine, *prompts)
        advice = explained(sidecar)
    assert "were stored before, were evicted, and were computed again." in advice
    assert re.search(
        r"A memory tier of [0-9.]+ x the size \([0-9.]+Mi\) would have kept [0-9]+ % of them", advice
    )
    assert max(again, key=lambda cause: again[cause]) == "evicted"
    assert again == {"evicted": 60 * 8 * CHUNK, "tail": 60}


@pytest.mark.redis
def test_rows_below_a_frozen_redis_are_unavailable():
    prompt = make_tokens(4 * CHUNK + 1)
    options = {"memory_size": "4Mi", "remote_timeout_seconds": 1}
    with (
        RedisProcess() as redis,
        only_engine(SETTINGS, remote_url=redis.unix_url, **options) as (sidecar, engine),
    ):
        engine.serve(prompt)
        sidecar.wait_until(lambda stats: not stats["num_unwritten_rows"])
        num_rows = sidecar.stats()["memory"]["usable_rows"]
        for _ in range(num_rows // 8 + 1):
            engine.serve(make_tokens(8 * CHUNK + 1))
        redis.freeze()
        engine.serve(make_tokens(CHUNK + 1))
        sidecar.wait_until(lambda stats: not stats["remote"]["is_reachable"])
        causes = causes_of(sidecar, engine, prompt)
        redis.thaw()
    assert causes == {"tier_unavailable": 4 * CHUNK, "tail": 1}


def test_engines_own_hits_count_for_the_engine(world):
    prompt = make_tokens(4 * CHUNK + BLOCK + 1)
    with world.engines(SimSettings(num_blocks=256, has_prefix_caching=True)) as (engine,):
        engine.serve(prompt)
        wait_reported(engine)
        difference = Difference(world.sidecar)
        for _ in range(2):
            engine.run(engine.add(prompt))
            engine.run()
        causes = difference.tokens(2 * len(prompt))
    assert causes == {"memory": 4 * CHUNK, "engine": 4 * CHUNK + BLOCK, "tail": BLOCK + 2}


def explained(sidecar: SidecarProcess) -> str:
    """Output of ``lmcache-sidecar explain``, in one line."""
    return " ".join(explain(sidecar)[1].split())


def first_finding(tokens: dict[str, int]) -> str:
    """The first advice of ``explain`` about tokens by cause."""
    causes = {"prompt_tokens": sum(tokens.values()), "cause_tokens": tokens, "diverged_tokens": {}}
    return findings(causes)[0].statement


def test_requests_whose_adapter_has_no_hash_are_not_cacheable_and_explain_says_so_first(world, tmp_path):
    prompt = make_tokens(4 * CHUNK + 7)
    adapter = {"lora_request": LoRARequest("mine", 1, str(tmp_path / "missing"))}
    with world.engines(SETTINGS) as (engine,):
        wait_reported(engine)
        difference = Difference(world.sidecar)
        for _ in range(3):
            engine.serve(prompt, **adapter)
        causes = difference.tokens(3 * len(prompt))
    assert causes == {"not_cacheable": 3 * len(prompt)}
    assert first_finding(causes) == "100 % of all prompt tokens belong to requests that cannot be cached."
