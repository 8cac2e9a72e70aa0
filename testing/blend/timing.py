"""Time to first token of long known documents with a question, and the part of it that blending itself takes.

All ways are measured in turn with each order of the documents, so that other load on the machine cancels out
in ratios.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers.generation.streamers import BaseStreamer

from lmcache.blend.retriever import SPTBlendRetriever, SPTBlendRetrieverTask
from lmcache.blend.selection import Selection
from lmcache.engines.huggingface import BlendedModel, CachedModel
from lmcache.engines.huggingface.blending import BlendingPass, QuestionAttention
from testing.blend import texts
from testing.blend.experiment import FULL, Progress, counter
from testing.blend.tiny import engine_for
from testing.blend.weights import Pretrained

PREFIX_CACHED = "prefix caching, first document known"
DOCUMENT_TOKENS = 1000
CACHE_GB, CHUNK_TOKENS = 2.5, 256

_BLENDING_FUNCTIONS = (
    (SPTBlendRetrieverTask, "move"),
    (BlendingPass, "__init__"),
    (BlendingPass, "blend"),
    (BlendingPass, "narrowed"),
    (QuestionAttention, "__init__"),
    (QuestionAttention, "add"),
)
"""Functions of a prefill that only blending needs: select tokens, rotate K, write rows, cut masks and hidden
states, read attention. The rest is the model's own work for the computed tokens."""


@dataclass
class Seconds:
    """Measured seconds. Each list has one value for each round."""

    first_token: dict[str, list[float]] = field(default_factory=dict)
    blending: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    """Time of blending's own functions in a blended prefill, by name. Retrieval is over before it begins."""
    reading: list[float] = field(default_factory=list)
    """Time to read the documents' KV from the engine's memory into one tensor."""
    copying: list[float] = field(default_factory=list)
    """Time to copy as many bytes from one tensor to another."""
    num_bytes: int = 0
    num_layers: int = 0
    num_tokens: int = 0


@torch.no_grad()
def timed(pretrained: Pretrained, num_rounds: int, ways: dict[str, Selection], seed: int = 0) -> Seconds:
    """Measure ``num_rounds`` rounds after one round to warm up."""
    model = pretrained.model
    documents, question = _texts(pretrained, seed)
    seconds = Seconds(num_layers=model.config.num_hidden_layers)
    with engine_for(model, max_local_cache_size=CACHE_GB, chunk_size=CHUNK_TOKENS) as engine:
        blended, cached = BlendedModel(model, engine), CachedModel(model, engine)
        blended.precompute(documents)
        progress = Progress("rounds of timing", num_rounds + 1)
        orders = list(permutations(documents))
        for number in range(num_rounds + 1):
            prompt = [*orders[number % len(orders)], question]
            result = seconds if number else Seconds()
            _first_tokens(blended, cached, prompt, ways, result)
            _parts(blended, prompt, ways, result)
            progress.step()
        blended.close()
        kv = engine.empty(sum(map(len, documents)))
        seconds.num_bytes, seconds.num_tokens = kv.nbytes, sum(map(len, prompt))
    return seconds


def _texts(pretrained: Pretrained, seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Documents that can be in any order, and a question."""
    rng = np.random.default_rng(seed)
    generated = texts.prompt(rng, counter(pretrained), DOCUMENT_TOKENS)
    parts = [
        texts.BETWEEN + text.removeprefix(texts.BETWEEN)
        for text in (*generated.documents, generated.question)
    ]
    *documents, question = (torch.tensor(pretrained.tokenizer(text)["input_ids"]) for text in parts)
    return [document[:DOCUMENT_TOKENS] for document in documents], question


def _first_tokens(
    blended: BlendedModel,
    cached: CachedModel,
    prompt: Sequence[torch.Tensor],
    ways: dict[str, Selection],
    result: Seconds,
) -> None:
    joined = torch.cat(list(prompt))[None]
    result.first_token.setdefault(FULL, []).append(_until_first_token(cached.model.generate, joined))
    with engine_for(cached.model, max_local_cache_size=CACHE_GB, chunk_size=CHUNK_TOKENS) as engine:
        exact = CachedModel(cached.model, engine)
        exact.generate(prompt[0][None], max_new_tokens=1)
        result.first_token.setdefault(PREFIX_CACHED, []).append(_until_first_token(exact.generate, joined))
        assert engine.hit_tokens_count, "the first document must hit"
    for name, blended.selection in ways.items():
        result.first_token.setdefault(name, []).append(_until_first_token(blended.generate, list(prompt)))


def _until_first_token(generate: Callable[..., Any], prompt: Any) -> float:
    clock = _Clock()
    start = time.perf_counter()
    generate(prompt, max_new_tokens=1, do_sample=False, streamer=clock)
    return clock.times[1] - start  # the first call passes the prompt


class _Clock(BaseStreamer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


def _parts(
    blended: BlendedModel, prompt: list[torch.Tensor], ways: dict[str, Selection], result: Seconds
) -> None:
    """Measure the time of blending's own functions in a prefill, and the time to read the KV."""
    for name, blended.selection in ways.items():
        with _blending_time() as spent:
            blended.prefill([prompt])
        result.blending.setdefault(name, []).append(dict(spent))
    documents = prompt[:-1]
    engine = blended.segments
    kv = engine.empty(sum(map(len, documents)))
    copy = torch.empty_like(kv).fill_(1)
    start = time.perf_counter()
    end = 0
    for document in documents:
        begin, end = end, end + len(document)
        assert engine.retrieve_into(document, kv[..., begin:end, :]) == len(document)
    result.reading.append(time.perf_counter() - start)
    start = time.perf_counter()
    copy.copy_(kv)
    result.copying.append(time.perf_counter() - start)


@contextlib.contextmanager
def _blending_time() -> Iterator[dict[str, float]]:
    """Seconds by function, in real prefills whose segments are retrieved before they begin."""
    spent: dict[str, float] = defaultdict(float)

    def clocked(owner: type, name: str) -> Any:
        original = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = original(*args, **kwargs)
            spent[f"{owner.__name__}.{name}"] += time.perf_counter() - start
            return result

        return mock.patch.object(owner, name, run)

    retrieve = SPTBlendRetriever.retrieve

    def retrieve_at_once(*args: Any) -> Any:
        task = retrieve(*args)
        task.result(0)
        return task

    with contextlib.ExitStack() as stack:
        for owner, name in _BLENDING_FUNCTIONS:
            stack.enter_context(clocked(owner, name))
        stack.enter_context(mock.patch.object(SPTBlendRetriever, "retrieve", retrieve_at_once))
        yield spent
