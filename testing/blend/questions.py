"""Questions for real models whose answers are in one document, or spread over two documents.

A sheet has three documents and questions about four people. Each person has a home, an instrument, an animal
and so on, all different. Two people are named where these facts are given. The other two are introduced at
the end of a document, and the next document refers to them as "he" or "she". The pronoun has a meaning only
with the document before it, and another meaning in another order. All answers to a question are in the
documents, so the chance to guess right is 25 %.

For each person the model continues "Anna plays the". Of the four possible words, the answer is the word whose
likelihood the name raises most, compared with the other three names on average. Without this correction, a
small model chooses the most common word for every person [1]_.

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
"""People who are named with their facts; all people; relations on a sheet."""
MAX_SENTENCES_BEFORE = 2
"""Maximum number of sentences before the facts about the person that the previous document introduced."""


class Sheet(NamedTuple):
    """Documents, and questions about them."""

    documents: tuple[str, ...]
    questions: tuple[tuple[str, ...], ...]
    """Texts that continue with the answer, by relation and person. Questions about people after the first
    ``NUM_NAMED`` need two documents."""
    answers: tuple[tuple[str, ...], ...]
    """Answers by relation and person. The answers of the other people are the wrong candidates."""


def sheet(rng: np.random.Generator, count: CountTokens, num_tokens: int = 100) -> Sheet:
    """A sheet whose documents have ``num_tokens`` tokens in addition to the facts."""
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
            num_before = int(rng.integers(min(MAX_SENTENCES_BEFORE, middle) + 1))
            sentences[num_before:num_before] = facts(pronoun, introduced[number - 1])
        documents.append(" ".join(sentences))
    questions = tuple(tuple(f"{BETWEEN}{name} {phrase}" for name in people) for phrase in relations)
    return Sheet(joined(documents), questions, answers)


def is_right(log_probabilities: np.ndarray) -> np.ndarray:
    """Whether each question is answered right: ``[..., person]`` from ``[..., person, candidate]``.

    The candidates of a relation are the people's answers, in the order of the people.
    """
    raised = log_probabilities - log_probabilities.mean(axis=-2, keepdims=True)
    chosen: np.ndarray = raised.argmax(axis=-1) == np.arange(raised.shape[-1])
    return chosen
