"""The little model's language: English documents with facts, some of which lean on the document before.

A document is a passage of Python's documentation (``pydoc_data.topics``, of the standard library) into which
facts are strewn: a key and its value, or a key and ``<same>``, which stands for the value named last, in this
document or in an earlier one. So a few tokens of a document mean something else after another document than
alone. A question is ``<ask>`` and a key; its answer is the key's value.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np

NUM_KEYS, NUM_VALUES, NUM_WORDS = 24, 12, 600
DOC, ASK, SAME, OTHER_WORD = range(4)
FIRST_KEY = 4
NO_VALUE = FIRST_KEY + NUM_KEYS
"""What ``<same>`` stands for when no value was named before; the values follow it."""
FIRST_WORD = NO_VALUE + NUM_VALUES
VOCAB_SIZE = FIRST_WORD + NUM_WORDS

NUM_DOCUMENTS = 3
SHARE_OF_SAME = 0.4

TEXT = " ".join(topics[name] for name in sorted(topics))


class Size(NamedTuple):
    """Of one document."""

    num_facts: int
    num_words: int


FULL = Size(5, 40)


def _passages() -> np.ndarray:
    """All of the text as tokens; words beyond the most frequent ones are one token."""
    words = re.findall(r"[A-Za-z]+|[^\sA-Za-z]", TEXT)
    frequent = [word for word, _ in Counter(words).most_common(NUM_WORDS)]
    ids = {word: FIRST_WORD + rank for rank, word in enumerate(frequent)}
    return np.array([ids.get(word, OTHER_WORD) for word in words])


_PASSAGES = _passages()


def documents(rng: np.random.Generator, size: Size = FULL) -> list[list[int]]:
    """Return documents about different keys."""
    keys = FIRST_KEY + rng.permutation(NUM_KEYS)[: NUM_DOCUMENTS * size.num_facts]
    made = []
    for of_document in keys.reshape(NUM_DOCUMENTS, -1):
        start = rng.integers(len(_PASSAGES) - size.num_words)
        words = _PASSAGES[start : start + size.num_words].tolist()
        places = sorted(rng.integers(0, size.num_words + 1, size.num_facts), reverse=True)
        for place, key in zip(places, of_document, strict=True):
            value = SAME if rng.random() < SHARE_OF_SAME else NO_VALUE + rng.integers(1, NUM_VALUES)
            words[place:place] = [int(key), int(value)]
        made.append([DOC, *words])
    return made


def answers(tokens: list[int]) -> dict[int, int]:
    """Return the value of each key."""
    found, value = {}, NO_VALUE
    for before, token in pairwise(tokens):
        if NO_VALUE < token < FIRST_WORD:
            value = token
        if FIRST_KEY <= before < NO_VALUE:
            found[before] = value
    return found


def lesson(rng: np.random.Generator, size: Size) -> tuple[list[int], list[int]]:
    """Return documents with a question for each key, and what to expect after each token.

    After ``<same>`` that is the value it stands for, though the text goes on with another word.
    """
    tokens = [token for document in documents(rng, size) for token in document]
    values = answers(tokens)
    for key in rng.permutation(list(values)):
        tokens += [ASK, int(key), values[key]]
    expected = [*tokens[1:], OTHER_WORD]
    for at, token in enumerate(tokens):
        if token == SAME:
            expected[at] = values[tokens[at - 1]]
    return tokens, expected
