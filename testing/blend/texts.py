"""Prompts of natural English for real models: passages of Python's documentation, and a question.

The text is ``pydoc_data.topics`` of the standard library, of which only whole paragraphs of prose are taken:
no headings, code, grammars, tables. It differs a little between versions of Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np

CountTokens = Callable[[str], int]
"""How long a text is, in the tokens of the model that is to read it."""

NUM_DOCUMENTS = 3
BETWEEN = "\n\n"
"""What documents but the first, and the question, begin with: so what divides them is within one of them."""

_OTHER_THAN_PROSE = re.compile(r"::=|>>>|\*\*\*|===|---|\n {6,}")
_SENTENCE_END = re.compile(r"(?<=[.]) (?=[A-Z])")
_SHORTEST_PARAGRAPH = 60  # characters: a shorter one is a heading of a list, or the end of one


class Prompt(NamedTuple):
    """Documents and a question about one of them."""

    documents: tuple[str, ...]
    question: str

    def text(self, separator: str = "") -> str:
        """All of it, divided by ``separator`` (``blend_separator`` of the configuration)."""
        return separator.join([*self.documents, self.question])


def prompt(rng: np.random.Generator, count: CountTokens, num_tokens: int = 200) -> Prompt:
    """Return a prompt; its documents have ``num_tokens`` tokens or, to end with a sentence, a few more."""
    names = [_NAMES[i] for i in rng.choice(len(_NAMES), NUM_DOCUMENTS, replace=False)]
    documents = [" ".join(passage(rng, count, num_tokens, _FIRST[name])) for name in names]
    asked = topics[names[rng.integers(NUM_DOCUMENTS)]].split("\n", 1)[0]
    question = f"Question: What does the text above say about {asked}?\nAnswer: It says that"
    return Prompt(joined(documents), BETWEEN + question)


def joined(documents: list[str]) -> tuple[str, ...]:
    """Let each document but the first begin with what divides them."""
    return tuple(BETWEEN + text if number else text for number, text in enumerate(documents))


def passage(
    rng: np.random.Generator, count: CountTokens, num_tokens: int, first: int | None = None
) -> list[str]:
    """Return sentences that follow one another, from the one numbered ``first``, or from anywhere."""
    start = int(rng.integers(len(SENTENCES))) if first is None else first
    found: list[str] = []
    length = 0
    while length < num_tokens:
        sentence = SENTENCES[(start + len(found)) % len(SENTENCES)]
        found.append(sentence)
        length += count(f" {sentence}")
    return found


def _sentences() -> tuple[list[str], dict[str, int]]:
    """Return the text, each paragraph once, and by topic the number of its first sentence."""
    found: list[str] = []
    first: dict[str, int] = {}
    seen = set()
    for name in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            text = " ".join(paragraph.split())
            is_prose = re.fullmatch(r"[A-Z].*[.]", text) and not _OTHER_THAN_PROSE.search(paragraph)
            if is_prose and len(text) >= _SHORTEST_PARAGRAPH and text not in seen:
                seen.add(text)
                first.setdefault(name, len(found))
                found += _SENTENCE_END.split(text)
    return found, first


SENTENCES, _FIRST = _sentences()
_NAMES = sorted(_FIRST)
