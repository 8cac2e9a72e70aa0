"""Causes of computed tokens, as a sidecar counts them for engines under vLLM's scheduler."""

import re
import threading

import pytest

from testing.deadlines import CALLS
from testing.processes import SidecarProcess
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


def explained(sidecar: SidecarProcess) -> str:
    """Output of ``lmcache-sidecar explain``, in one line."""
    return " ".join(explain(sidecar)[1].split())
