"""Prompts of three kinds of traffic, as token ids. Pure."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

_TRACE = Path(__file__).with_name("sessions.jsonl")
_TRACE_BLOCK_TOKENS = 512
_TURNS, _QUESTIONS = 6, 6
"""Requests of one conversation, and for one document."""
_MIN_TOKENS = 64
"""Shortest part of a prompt."""


class Request(NamedTuple):
    """One prompt."""

    prompt: tuple[int, ...]
    """Token ids."""
    output_tokens: int
    """Tokens to generate."""


Session = Sequence[Request]
"""Requests that follow each other: a request starts when the one before it has ended."""


class Shape(NamedTuple):
    """Sizes of a workload."""

    num_requests: int
    prompt_tokens: int
    """Tokens of the longest prompt."""
    output_tokens: int
    """Most tokens that a request generates."""
    vocabulary: int
    """Token ids are below this number."""
    seed: str
    """Another seed has other tokens, so that no cache knows them."""

    def tokens(self, number: int, *names: object) -> tuple[int, ...]:
        """Return random token ids. Equal names have equal ids."""
        generator = random.Random(" ".join(map(str, (self.seed, *names))))
        lowest = min(1000, self.vocabulary // 8)  # the first ids of many vocabularies are special tokens
        return tuple(generator.randrange(lowest, self.vocabulary) for _ in range(number))


def _chat(shape: Shape) -> Iterator[Session]:
    """Yield conversations with one of two system prompts. Each turn repeats the conversation so far."""
    system = shape.prompt_tokens // 4
    turn = max(_MIN_TOKENS, (shape.prompt_tokens - system) // _TURNS)
    for number in range(shape.num_requests):
        prompt = shape.tokens(system, "system", number % 2)
        session = []
        for step in range(_TURNS):
            prompt += shape.tokens(turn, "chat", number, step)
            session.append(Request(prompt[: shape.prompt_tokens], shape.output_tokens))
        yield session


def _documents(shape: Shape) -> Iterator[Session]:
    """Yield questions about long documents, each by another user."""
    question = max(_MIN_TOKENS, shape.prompt_tokens // 16)
    length = shape.prompt_tokens - question
    for number in range(shape.num_requests):
        document, asked = divmod(number, _QUESTIONS)
        prompt = shape.tokens(length, "document", document) + shape.tokens(question, document, asked)
        yield [Request(prompt, shape.output_tokens)]


def _agents(shape: Shape) -> Iterator[Session]:
    """Yield recorded sessions whose prompts grow at each step, with their shared prefixes and lengths."""
    lines = [json.loads(line) for line in _TRACE.read_text(encoding="utf-8").splitlines()]
    longest = max(line["input_length"] for line in lines)
    scale = min(1.0, shape.prompt_tokens / longest)
    sessions: dict[int, list[Mapping[str, Any]]] = {}
    for line in lines:
        sessions.setdefault(line["session"], []).append(line)
    for turn in range(shape.num_requests):  # after the last session, the same sessions with other tokens
        for steps in sessions.values():
            yield [_recorded(shape, step, scale, turn) for step in steps]


def _recorded(shape: Shape, step: Mapping[str, Any], scale: float, turn: int) -> Request:
    length = max(_MIN_TOKENS, int(scale * step["input_length"]))
    block = max(1, int(scale * _TRACE_BLOCK_TOKENS))
    blocks = (shape.tokens(block, "block", turn, name) for name in step["hash_ids"])
    prompt = tuple(token for tokens in blocks for token in tokens)
    return Request(prompt[:length], max(1, min(shape.output_tokens, step["output_length"])))


WORKLOADS: Mapping[str, Callable[[Shape], Iterator[Session]]] = {
    "chat": _chat,
    "documents": _documents,
    "agents": _agents,
}
"""Generators of sessions, by name."""


def sessions(name: str, shape: Shape) -> list[Session]:
    """Return the sessions of a workload, with ``shape.num_requests`` requests in total."""
    return list(_limited(WORKLOADS[name](shape._replace(seed=f"{shape.seed} {name}")), shape.num_requests))


def _limited(generated: Iterable[Session], num_requests: int) -> Iterator[Session]:
    for session in generated:
        part = list(islice(session, num_requests))
        num_requests -= len(part)
        if part:
            yield part
        if not num_requests:
            return
