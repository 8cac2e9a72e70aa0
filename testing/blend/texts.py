"""Prompts of natural English for real models: passages of Python's documentation, and a question.

The text is ``pydoc_data.topics`` of the standard library. Only whole paragraphs of prose are used: no
headings, code, grammars and tables. The text differs a little between versions of Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np

CountTokens = Callable[[str], int]
"""Counts the tokens of a text for one model."""

NUM_DOCUMENTS = 3
BETWEEN = "\n\n"
"""Start of the question and of each document but the first: separators belong to the text that follows."""

_OTHER_THAN_PROSE = re.compile(r"::=|>>>|\*\*\*|===|---|\n {6,}")
_SENTENCE_END = re.compile(r"(?<=[.]) (?=[A-Z])")
_SHORTEST_PARAGRAPH = 60  # characters; shorter ones are headings or ends of lists


class Prompt(NamedTuple):
    """Documents and a question about one of them."""

    documents: tuple[str, ...]
    question: str


def prompt(rng: np.random.Generator, count: CountTokens, num_tokens: int = 200) -> Prompt:
    """A prompt whose documents have ``num_tokens`` tokens, or a few more to end with a sentence."""
    documents, questions = _documents(rng, count, num_tokens)
    return Prompt(documents, questions[rng.integers(NUM_DOCUMENTS)])


def conversation(
    rng: np.random.Generator, count: CountTokens, num_tokens: int = 200
) -> tuple[tuple[str, ...], list[str]]:
    """Return documents as those of ``prompt``, and a question about each in random order."""
    documents, questions = _documents(rng, count, num_tokens)
    return documents, [questions[i] for i in rng.permutation(NUM_DOCUMENTS)]


def _documents(
    rng: np.random.Generator, count: CountTokens, num_tokens: int
) -> tuple[tuple[str, ...], list[str]]:
    """Return documents, and a question about each."""
    names = [_NAMES[i] for i in rng.choice(len(_NAMES), NUM_DOCUMENTS, replace=False)]
    documents = [" ".join(passage(rng, count, num_tokens, _FIRST[name])) for name in names]
    subjects = [topics[name].split("\n", 1)[0] for name in names]
    asked = "{}Question: What does the text above say about {}?\nAnswer: It says that"
    return joined(documents), [asked.format(BETWEEN, subject) for subject in subjects]


def joined(documents: list[str]) -> tuple[str, ...]:
    """Start each document but the first with the separator."""
    return tuple(BETWEEN + text if number else text for number, text in enumerate(documents))


def passage(
    rng: np.random.Generator, count: CountTokens, num_tokens: int, first: int | None = None
) -> list[str]:
    """Consecutive sentences, from the sentence numbered ``first``, or from a random one."""
    start = int(rng.integers(len(SENTENCES))) if first is None else first
    sentences: list[str] = []
    length = 0
    while length < num_tokens:
        sentence = SENTENCES[(start + len(sentences)) % len(SENTENCES)]
        sentences.append(sentence)
        length += count(f" {sentence}")
    return sentences


def _sentences() -> tuple[list[str], dict[str, int]]:
    """All sentences without those of repeated paragraphs, and the number of each topic's first sentence."""
    sentences: list[str] = []
    first: dict[str, int] = {}
    paragraphs = set()
    for name in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            text = " ".join(paragraph.split())
            is_prose = re.fullmatch(r"[A-Z].*[.]", text) and not _OTHER_THAN_PROSE.search(paragraph)
            if is_prose and len(text) >= _SHORTEST_PARAGRAPH and text not in paragraphs:
                paragraphs.add(text)
                first.setdefault(name, len(sentences))
                sentences += _SENTENCE_END.split(text)
    return sentences, first


SENTENCES, _FIRST = _sentences()
_NAMES = sorted(_FIRST)
