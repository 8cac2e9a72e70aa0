"""Questions for real models whose answers lie in one document, or are spread over two.

A sheet is three documents and questions about four people. Each has a home, an instrument, an animal or so,
of which nobody else has the same. Two people are named where that is said. The two others are introduced as
a document ends, and the next one says "he" or "she": only with the document before it does that mean anyone,
and in another order somebody else. All answers to a question stand in the documents, so chance is 25 %.

How the model answers: for each person it is asked to go on after "Anna plays the", and of the four words that
could follow the one counts that the name makes likelier than the other three names do, on average. Without
that, a small model says the commonest word, whomever it is asked about [1]_.

.. [1] Holtzman et al. 2021, "Surface Form Competition: Why the Highest Probability Answer Isn't Always
   Right"; Zhao et al. 2021, "Calibrate Before Use".
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from testing.blend.texts import BETWEEN, NUM_DOCUMENTS, CountTokens, joined, passage

NAMES = {
    "She": ("Anna", "Mary", "Ruth", "Helen", "Sarah", "Emma", "Julia", "Alice", "Susan", "Laura"),
    "He": ("Peter", "Paul", "David", "Henry", "Simon", "Frank", "Oscar", "Martin", "Walter", "George"),
}
RELATIONS = {
    "lives in": "Paris London Rome Berlin Madrid Vienna Boston Chicago Tokyo Moscow",
    "works as a": "nurse teacher pilot lawyer farmer baker painter doctor",
    "plays the": "piano guitar violin drums flute trumpet",
    "has at home a": "dog cat horse bird rabbit snake pig",
    "likes to drink": "tea coffee milk wine water beer juice",
    "speaks": "French German Spanish Italian Russian Chinese Greek",
}
NUM_NAMED, NUM_PEOPLE, NUM_ASKED = 2, 4, 2
"""People who are named where they are told of; all; relations on a sheet."""
MOST_BEFORE = 2
"""Sentences of a document before what it says of the one whom the document before introduced, at most."""


class Sheet(NamedTuple):
    """Documents, and what is asked about them."""

    documents: tuple[str, ...]
    questions: tuple[tuple[str, ...], ...]
    """By relation and person: what goes on with the answer. Those about people after the first ``NUM_NAMED``
    need two documents."""
    answers: tuple[tuple[str, ...], ...]
    """By relation and person. Those of the others are what else can be chosen."""


def sheet(rng: np.random.Generator, count: CountTokens, num_tokens: int = 100) -> Sheet:
    """Return a sheet whose documents have ``num_tokens`` tokens, and those of the facts besides."""
    pronoun = str(rng.choice(list(NAMES)))
    people = [str(name) for name in rng.choice(NAMES[pronoun], NUM_PEOPLE, replace=False)]
    relations = [str(phrase) for phrase in rng.choice(list(RELATIONS), NUM_ASKED, replace=False)]
    answers = tuple(
        tuple(str(value) for value in rng.choice(RELATIONS[phrase].split(), NUM_PEOPLE, replace=False))
        for phrase in relations
    )
    named, introduced = people[:NUM_NAMED], people[NUM_NAMED:]

    def facts(subject: str, person: str) -> list[str]:
        values = [row[people.index(person)] for row in answers]
        return [f"{subject} {phrase} {value}." for phrase, value in zip(relations, values, strict=True)]

    documents = []
    for number in range(NUM_DOCUMENTS):
        sentences = passage(rng, count, num_tokens)
        middle = len(sentences) // 2
        if number < NUM_DOCUMENTS - 1:
            name = introduced[number]
            sentences.append(f"Yesterday I met {name}. {name} is a friend of mine.")
        if number % 2 == 0:
            person = named[number // 2]
            sentences[middle:middle] = facts(person, person)
        if number > 0:
            before = int(rng.integers(min(MOST_BEFORE, middle) + 1))
            sentences[before:before] = facts(pronoun, introduced[number - 1])
        documents.append(" ".join(sentences))
    questions = tuple(tuple(f"{BETWEEN}{name} {phrase}" for name in people) for phrase in relations)
    return Sheet(joined(documents), questions, answers)


def is_right(log_probabilities: np.ndarray) -> np.ndarray:
    """Tell of each question whether its answer is chosen; ``[..., person]`` of ``[..., person, candidate]``.

    The candidates of a relation are the people's answers, in the people's order.
    """
    raised = log_probabilities - log_probabilities.mean(axis=-2, keepdims=True)
    chosen: np.ndarray = raised.argmax(axis=-1) == np.arange(raised.shape[-1])
    return chosen
