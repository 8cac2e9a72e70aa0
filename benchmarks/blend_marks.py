"""Measure the search for known documents in a prompt, on the scheduler's thread.

Times are processor milliseconds of the thread, so that other load on the machine changes them less. They
include the conversion of vLLM's list of tokens.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

from benchmarks.report import Figure, Report, at_most, of
from lmcache_client.vllm.blend.known import MAX_PROMPTS
from lmcache_client.vllm.blend.marks import MarkTable, make_mark, seed_of

ROUNDS = int(os.environ.get("ROUNDS", "100"))
NUM_DOCUMENTS, DOCUMENT_TOKENS, VOCABULARY = 100_000, 1000, 150_000
BARS = {8_192: 1.0, 65_536: 2.0}
"""Largest time of a search in ms, by the prompt's tokens."""
REPEATED_BAR = 5.0


def milliseconds(task: Callable[[], object]) -> float:
    """Return the median processor time of a task."""
    samples = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        task()
        samples.append(1000 * (time.thread_time() - start))
    return statistics.median(samples)


def run() -> Report:
    from vllm.v1.utils import ConstantList

    rng, seed = random.Random(1), seed_of(b"n" * 32, None)

    def marks(number: int) -> list[int]:
        return [rng.getrandbits(40) << 24 | DOCUMENT_TOKENS for _ in range(number)]

    def mark_of(tokens: list[int]) -> int:
        mark = make_mark(tokens, DOCUMENT_TOKENS, seed)
        assert mark is not None
        return mark

    documents, prompts = MarkTable(), MarkTable(MAX_PROMPTS)
    documents.add(marks(NUM_DOCUMENTS))
    prompts.add(marks(MAX_PROMPTS))
    figures: list[Figure] = []
    for num_tokens, bar in BARS.items():
        prompt = ConstantList([rng.randrange(VOCABULARY) for _ in range(num_tokens)])
        repeated = ConstantList([num_tokens] * num_tokens)
        starts = range(0, num_tokens - DOCUMENT_TOKENS, DOCUMENT_TOKENS)
        search = partial(documents.find, prompt, seed)
        what = f"search of {num_tokens:,} tokens"
        figures.append(at_most(f"{what}, nothing known", milliseconds(search), "ms", bar))
        documents.add(mark_of(prompt[start:]) for start in starts)
        what_known = f"{what}, {len(search())} known documents"
        figures.append(at_most(what_known, milliseconds(search), "ms", bar))
        with_prompts = partial(search, more=prompts)
        figures.append(of(f"{what_known}, and earlier prompts", milliseconds(with_prompts), "ms"))
        documents.add([mark_of(repeated[:])])
        of_repeated = partial(documents.find, repeated, seed)
        figures.append(at_most(f"{what}, all equal and known", milliseconds(of_repeated), "ms", REPEATED_BAR))
    pages = iter([marks(1000) for _ in range(ROUNDS)])
    added = milliseconds(lambda: documents.add(next(pages)))
    figures.append(of("addition of 1,000 marks, on the lookup thread", added, "ms"))
    conditions = f"{NUM_DOCUMENTS:,} documents and {MAX_PROMPTS:,} earlier prompts; medians of {ROUNDS}"
    return Report("blend_marks", conditions, figures)
