"""Questions for real models: making and marking them needs no weights."""

import numpy as np
import pytest

from testing.blend import questions

NUM_TOKENS = 60


def count(text: str) -> int:
    return len(text.split())


def facts_of(sheet: questions.Sheet, person: int) -> list[str]:
    """Return the facts about a person, without the name."""
    rows = zip(sheet.questions, sheet.answers, strict=True)
    phrases = [row_questions[person].strip().split(" ", 1)[1] for row_questions, _ in rows]
    return [f" {phrase} {row[person]}." for phrase, row in zip(phrases, sheet.answers, strict=True)]


def name_of(sheet: questions.Sheet, person: int) -> str:
    return sheet.questions[0][person].split()[0]


@pytest.mark.parametrize("seed", range(5))
def test_documents_repeat_names_for_named_people_and_use_pronouns_for_others(seed):
    sheet = questions.sheet(np.random.default_rng(seed), count, NUM_TOKENS)
    joined = "".join(sheet.documents)
    pronoun = next(word for word, names in questions.NAMES.items() if name_of(sheet, 0) in names)
    for person in range(questions.NUM_PEOPLE):
        name, facts = name_of(sheet, person), facts_of(sheet, person)
        assert len(facts) == questions.NUM_ASKED
        (holder,) = [text for text in sheet.documents if facts[0] in text]
        if person < questions.NUM_NAMED:
            assert "".join(f" {name}{fact}" for fact in facts) in f" {holder}"
        else:
            pronoun_facts = " ".join(f"{pronoun}{fact}" for fact in facts)
            assert name not in holder
            assert pronoun_facts in holder
            # The person is the last of all people whose name occurs before the facts.
            names = {name_of(sheet, other) for other in range(questions.NUM_PEOPLE)}
            before = joined[: joined.index(pronoun_facts)].replace(".", "").split()
            assert [word for word in before if word in names][-1] == name


@pytest.mark.parametrize("seed", range(5))
def test_each_answer_belongs_to_a_single_person_and_starts_uniquely(seed):
    sheet = questions.sheet(np.random.default_rng(seed), count, NUM_TOKENS)
    for row_questions, row in zip(sheet.questions, sheet.answers, strict=True):
        assert len(row_questions) == len(row) == len({answer[:3] for answer in row}) == questions.NUM_PEOPLE
        assert all("".join(sheet.documents).count(f" {answer}.") == 1 for answer in row)


def test_right_answer_is_the_answer_raised_most_by_the_name():
    log_probabilities = np.log(
        [[0.5, 0.1, 0.1, 0.1], [0.4, 0.2, 0.1, 0.1], [0.5, 0.1, 0.2, 0.1], [0.5, 0.1, 0.1, 0.2]]
    )
    assert log_probabilities.argmax(axis=-1).tolist() == [0, 0, 0, 0]
    assert questions.is_right(log_probabilities).tolist() == [True, True, True, True]
    assert questions.is_right(log_probabilities[[1, 0, 2, 3]]).tolist() == [False, False, True, True]
