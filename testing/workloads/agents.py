"""Sessions of agents that call tools, with the hints that a truthful framework sends.

Sessions share a few system prompts with descriptions of tools. Between two requests of a session, a tool runs
for seconds or minutes. Some users abandon their session while a tool runs. Prompts of chats, which never
repeat, fill the cache meanwhile.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import NamedTuple

from lmcache_store.hints import HintAction, HintKind
from testing.workloads.requests import TOKENS, Request, row_hash


class Hint(NamedTuple):
    """A hint about the latest prompt of a session."""

    time: float
    session: int
    keys: tuple[int, ...]
    """Hashes of the rows of the prompt, head first."""
    action: HintAction


class Tool(NamedTuple):
    """A kind of tool that agents call."""

    share: float
    """Part of all calls."""
    seconds: float
    """Median run time."""


TOOLS = Tool(0.35, 4.0), Tool(0.25, 15.0), Tool(0.4, 150.0)
_SPREAD = 0.25
_LATEST = math.exp(1.645 * _SPREAD)
"""95 % of all calls take at most this multiple of the tool's median run time."""

_ANSWER_SECONDS = 3.0
_NUM_TURNS = 10
_ABANDONED = 0.02
"""Part of the tool calls at which the user gives up. The framework does not know it."""

CHAT_FACTOR = 3
"""Rows of prompts that never repeat, as a multiple of the different rows of agents."""

NO_SESSION = -1
"""Session of prompts that never repeat."""


def agent_steps(seconds: float, *, sessions_per_second: float = 0.03, seed: int = 0) -> list[Request | Hint]:
    """Return requests and truthful hints in the order of their time.

    When a tool starts, the prompt is retained for as long as the tool may run. When a session ends, its
    prompt is released from the end of the shared system prompt on.
    """
    rng = random.Random(seed)
    prompts = [tuple(row_hash(11, seed, number, i) for i in range(rng.randint(6, 12))) for number in range(4)]
    steps: list[Request | Hint] = []
    time = 0.0
    for session in range(10**9):
        time += rng.expovariate(sessions_per_second)
        if time > seconds:
            break
        steps += _session(rng, session, rng.choice(prompts), time, seed)
    num_agents = len({key for step in steps for key in step.keys})
    num_chat = num_agents * CHAT_FACTOR
    while num_chat > 0:
        number = len(steps)
        keys = tuple(row_hash(12, seed, number, i) for i in range(rng.randint(4, 24)))
        steps.append(Request(rng.random() * seconds, NO_SESSION, keys))
        num_chat -= len(keys)
    return sorted((step for step in steps if step.time <= seconds), key=lambda step: step.time)


def _session(
    rng: random.Random, session: int, system: tuple[int, ...], time: float, seed: int
) -> Iterator[Request | Hint]:
    keys, num_new = system, rng.randint(6, 24)
    while True:
        keys += tuple(row_hash(13, seed, session, len(keys) + i) for i in range(num_new))
        yield Request(time, session, keys)
        time += _ANSWER_SECONDS
        if rng.random() < 1 / _NUM_TURNS:
            yield Hint(time, session, keys, _released(len(system)))
            return
        (tool,) = rng.choices(TOOLS, [tool.share for tool in TOOLS])
        yield Hint(time, session, keys, retained(_LATEST * tool.seconds))
        if rng.random() < _ABANDONED:
            return
        time += rng.lognormvariate(math.log(tool.seconds), _SPREAD)
        num_new = rng.randint(1, 6)


def retained(seconds: float) -> HintAction:
    """Return an action that retains a whole prompt."""
    return HintAction("0", HintKind.RETAIN, ttl_seconds=seconds)


def _released(num_rows: int) -> HintAction:
    """Return an action that releases a prompt except its first rows. A row has ``TOKENS`` tokens."""
    return HintAction("0", HintKind.RELEASE, begin_token=num_rows * TOKENS)
