"""Places of a prompt's chunks: questions to a sidecar, and its joined answers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache.explain.prompt import MAX_KEYS, Engine, Named, Run, chunk_keys, join, lines, questions
from lmcache.kv_groups import GroupKind, KVGroup

CHUNK, BLOCK = 64, 16
ENGINE = Engine(
    "e", "m", b"n" * 32, "", CHUNK, (KVGroup(0, BLOCK, 4096),), "sha256_cbor", b"r" * 32, BLOCK, True
)
WINDOWED = replace(
    ENGINE, groups=(KVGroup(0, BLOCK, 4096), KVGroup(1, BLOCK, 4096, CHUNK, GroupKind.SLIDING_WINDOW))
)
LATER_BLOCKS = CHUNK // BLOCK - 1


class Sidecar:
    """Answers questions from what each chunk of one prompt is, by position."""

    def __init__(self, named: Named, places: list[str], causes: list[str], known: str, other: str) -> None:
        """``known`` and ``other``: a digit for each block of the first chunk but the last, and each chunk."""
        self._positions = {key: position for position, key in enumerate(named.keys[0])}
        self._places, self._causes, self._known, self._other = places, causes, known, other

    def answer(self, question: dict) -> dict:
        first = bytes.fromhex(question["keys"][0])
        keys = [first[start : start + 64] for start in range(0, len(first), 64)]
        assert len(keys) * len(question["keys"]) <= MAX_KEYS
        start = self._positions[keys[0]]
        part = slice(start, start + len(keys))
        num_blocks = len(question["first_blocks"]) // 16
        assert num_blocks == (0 if start else LATER_BLOCKS)
        chain = slice(LATER_BLOCKS + start - num_blocks, LATER_BLOCKS + part.stop)
        other = self._other[chain]
        return {
            "places": [letters[part] for letters in self._places],
            "causes": self._causes[part],
            "is_known": self._known[chain],
            "has_other_next": other[:-1] + "0",  # nothing follows the last chunk of a question
        }


def explained(places, causes=(), known="", other="", engine=ENGINE, num_tail=7):
    num_chunks = len(places[0])
    tokens = list(range(num_chunks * CHUNK + num_tail))
    named = chunk_keys(engine, tokens)
    sidecar = Sidecar(
        named,
        places,
        list(causes) or [""] * num_chunks,
        known or "1" * (LATER_BLOCKS + num_chunks),
        other or "0" * (LATER_BLOCKS + num_chunks),
    )
    return join(engine, len(tokens), list(map(sidecar.answer, questions(engine, named))))


def test_neighbouring_chunks_of_one_place_are_one_run():
    prompt = explained(["mmrd-"], ["", "", "evicted", "slower_than_computing", "evicted"])
    assert prompt.runs == (
        Run(0, 2 * CHUNK, "memory", ""),
        Run(2 * CHUNK, CHUNK, "remote", ""),
        Run(3 * CHUNK, CHUNK, "disk", "slower_than_computing"),
        Run(4 * CHUNK, CHUNK, "nowhere", "evicted"),
        Run(5 * CHUNK, 7, "nowhere", "tail"),
    )
    assert (prompt.memory_tokens, prompt.reachable_tokens) == (2 * CHUNK, 4 * CHUNK)
    assert prompt.common_tokens == 5 * CHUNK


def test_chunks_after_the_last_common_one_are_new_or_diverged():
    known = "1" * LATER_BLOCKS + "1100"
    for other, cause in (("0000000", "new"), ("0000100", "diverged")):
        prompt = explained(["mm--"], ["", "", "not_stored", "not_stored"], known, other)
        assert prompt.runs[1] == Run(2 * CHUNK, 2 * CHUNK, "nowhere", cause)
        assert prompt.common_tokens == 2 * CHUNK


def test_a_divergence_in_the_first_chunk_is_found_by_blocks():
    prompt = explained(["--"], ["not_stored"] * 2, "11000", "01000")
    assert prompt.common_tokens == 2 * BLOCK
    assert prompt.runs[0] == Run(0, 2 * CHUNK, "nowhere", "diverged")


def test_a_tier_that_does_not_answer_is_unknown():
    prompt = explained(["m?"], ["", "evicted"])
    assert prompt.runs[1] == Run(CHUNK, CHUNK, "unknown", "tier_unavailable")
    assert prompt.reachable_tokens == CHUNK


def test_a_window_needs_only_the_last_chunks():
    prompt = explained(["mmmm", "---m"], engine=WINDOWED)
    assert prompt.runs[0] == Run(0, 4 * CHUNK, "memory", "")
    assert prompt.memory_tokens == 4 * CHUNK
    assert explained(["mmmm", "m---"], engine=WINDOWED).memory_tokens == CHUNK


@given(st.integers(1, 3 * MAX_KEYS), st.data(), st.sampled_from([ENGINE, WINDOWED]))
def test_a_prompt_of_many_questions_is_joined_as_one(num_chunks, data, engine):
    num_known = data.draw(st.integers(0, num_chunks))
    digits = "1" * (LATER_BLOCKS + num_known) + "0" * (num_chunks - num_known)
    other = "0" * (LATER_BLOCKS + num_known - 1) + "1" + "0" * (num_chunks - num_known)
    letters = "m" * num_known + "-" * (num_chunks - num_known)
    causes = [""] * num_known + ["not_stored"] * (num_chunks - num_known)
    prompt = explained([letters] * len(engine.groups), causes, digits, other, engine)
    expected = [(num_known, "memory", ""), (num_chunks - num_known, "nowhere", "diverged")]
    assert [(run.num_tokens, run.place, run.cause) for run in prompt.runs[:-1]] == [
        (number * CHUNK, place, cause) for number, place, cause in expected if number
    ]
    assert prompt.memory_tokens == num_known * CHUNK


def test_text_for_a_terminal_has_every_run_and_the_outcome():
    text = "\n".join(lines(explained(["mr-"], ["", "evicted", "evicted"])))
    assert "0 - 64  memory\n" in text
    assert "128 - 192  nowhere   evicted: an earlier prompt stored them" in text
    assert (
        "would now load 64 tokens from the memory tier, and 64 from lower tiers, if they deliver in time. "
        "It would compute 71." in text
    )


def test_salts_and_namespaces_give_other_keys():
    tokens = list(range(2 * CHUNK))
    keys = {
        tuple(chunk_keys(engine, tokens, salt).keys[0])
        for engine in (ENGINE, replace(ENGINE, namespace=b"o" * 32), replace(ENGINE, root=b"q" * 32))
        for salt in ("", "a")
    }
    assert len(keys) == 6


def test_the_last_chunk_of_a_windowed_prompt_is_never_loaded_as_a_whole():
    assert len(chunk_keys(ENGINE, range(2 * CHUNK)).keys[0]) == 2
    assert len(chunk_keys(WINDOWED, range(2 * CHUNK)).keys[0]) == 1


def test_an_engine_of_another_form_is_refused():
    with pytest.raises(LookupError):
        Engine.of({"engine": "e", "groups": []})
