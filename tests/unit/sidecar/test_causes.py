"""One cause for each token of a prompt."""

import hashlib
from asyncio import Future
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_sidecar.explain.causes import Blocking, Causes, UncountedRequest, find_blocking
from lmcache_sidecar.explain.requests import ExplainedRequest
from lmcache_sidecar.explain.sources import find_sources
from lmcache_store.causes import CAUSES
from lmcache_store.kv_groups import KVGroup
from lmcache_store.tiers.memory.contracts import Chains
from lmcache_store.tiers.tiered.absences import Absence
from lmcache_store.tiers.tiered.history import ChunkHistory, chunk_names

CHUNK, BLOCK = 256, 16
EVICTED = Blocking(Absence.EVICTED)


def block_keys(prompt: str) -> list[bytes]:
    prefixes = [prompt[: end + 1] for end in range(len(prompt))]
    return [b"n" * 32 + hashlib.sha256(part.encode()).digest() for part in prefixes]


class Engine:
    """Reports prompts to ``causes``, in which a letter stands for the 16 tokens of a block."""

    def __init__(self) -> None:
        self.deferred: list = []
        self.causes = Causes(lambda seconds, action: self.deferred.append((seconds, action)))
        self.history = ChunkHistory(1 << 10)

    def report(
        self,
        prompt: str,
        num_engine: int = 0,
        num_loaded: int = 0,
        blocking: Absence | Blocking = Absence.EVICTED,
        num_tail: int = 5,
        time: float = 0.0,
        late_blocking: Future[Blocking] | None = None,
        num_blended: int = 0,
        **origins: str,
    ) -> ExplainedRequest:
        """``num_engine`` and ``num_loaded`` are tokens; ``origins``: tiers by chunk, like ``c1="disk"``."""
        keys, per_chunk = block_keys(prompt), CHUNK // BLOCK
        chunk_keys = keys[per_chunk - 1 :: per_chunk]
        chains = Chains(CHUNK, (KVGroup(0, BLOCK, 4096),), (chunk_keys,))
        num_held = num_engine // CHUNK
        message = pb.Scheduled(
            num_engine_chunks=num_held,
            num_hit_chunks=max(num_held, -(-(num_engine + num_loaded) // CHUNK) if num_loaded else 0),
            num_loaded_tokens=num_loaded,
            num_prompt_tokens=len(prompt) * BLOCK + num_tail,
            num_engine_tokens=num_engine,
            first_blocks=b"".join(key[-8:] for key in keys[: per_chunk - 1]) if chunk_keys else b"",
            block_tokens=BLOCK,
            num_blended_tokens=num_blended,
        )
        tiers = {chunk_keys[int(name[1:])]: tier for name, tier in origins.items()}
        sources = find_sources(chains, message, tiers)
        if isinstance(blocking, Absence):
            blocking = Blocking(blocking, blocking is Absence.NOT_STORED)
        request = UncountedRequest(time, "id", chains, message, sources, self.history, blocking)
        self.causes.note(request._replace(late_blocking=late_blocking))
        self.causes.settle()
        return self.causes.requests[-1]


def run_deferred(engine: Engine) -> None:
    """Count one slice."""
    _, action = engine.deferred.pop()
    action()


def prompt(chunks: str) -> str:
    """A prompt of whole chunks, each a letter."""
    return "".join(chunk * (CHUNK // BLOCK) for chunk in chunks)


NEW_TWO = {"new": 2 * CHUNK, "tail": 5}
UNSTORED = Blocking(Absence.NOT_STORED, is_unstored=False)
"""Another KV group stored the chunk: an engine has no snapshot of a state at the end of every chunk."""


@pytest.mark.parametrize(
    ("earlier", "report", "tokens"),
    [
        pytest.param("", ["ab"], NEW_TWO, id="a first prompt is new but for its tail"),
        pytest.param("ab", ["abc", 0, 2 * CHUNK], {"memory": 2 * CHUNK, "new": CHUNK, "tail": 5},
                     id="the next turn of a conversation is new"),
        pytest.param("abc", ["abcd", 0, CHUNK, Absence.TOO_LATE],
                     {"memory": CHUNK, "too_late": 2 * CHUNK, "new": CHUNK, "tail": 5},
                     id="chunks of earlier prompts have the reason of the first absent one"),
        pytest.param("ab", ["ab", 0, 0, UNSTORED], {"not_stored": 2 * CHUNK, "tail": 5},
                     id="a chunk that only another KV group stored is not stored"),
        pytest.param("ab", ["ab", 0, 2 * CHUNK - BLOCK, Absence.EVICTED, 0],
                     {"memory": 2 * CHUNK - BLOCK, "tail": BLOCK}, id="the last token of a full hit is tail"),
        pytest.param("ab", ["ab", CHUNK + 3 * BLOCK],
                     {"engine": CHUNK + 3 * BLOCK, "evicted": CHUNK - 3 * BLOCK, "tail": 5},
                     id="half a chunk in the engine is not computed"),
        pytest.param("", ["", 0, 0, Absence.EVICTED, CHUNK + 1], {"not_cacheable": CHUNK + 1},
                     id="a long request without keys is not cacheable"),
        pytest.param("", ["", 0, 0, Absence.EVICTED, 53], {"tail": 53}, id="a short one is tail"),
        pytest.param("", ["ab", 0, 0, Absence.EVICTED, -7], {"new": 2 * CHUNK},
                     id="a report of fewer tokens than its chunks counts the chunks"),
    ],
)  # fmt: skip
def test_each_token_of_a_prompt_has_one_cause(earlier, report, tokens):
    engine = Engine()
    engine.report(prompt(earlier))
    assert engine.report(prompt(report[0]), *report[1:]).tokens == tokens


def test_a_hit_counts_for_the_tier_that_held_it():
    explained = Engine().report(prompt("abcde"), CHUNK, 3 * CHUNK, c1="disk", c2="remote")
    assert explained.tokens == dict.fromkeys(("engine", "disk", "remote", "memory", "new"), CHUNK) | {
        "tail": 5
    }


@pytest.mark.parametrize("num_hit", [0, 1])
def test_chunks_that_only_a_lower_tier_knows_are_not_new(num_hit):
    """Lower tiers hold chunks, so the first chunk's blocks and hits may be new to the sidecar."""
    engine = Engine()
    engine.history.note_found(chunk_names(block_keys(prompt("abc"))[15::16][num_hit:]))
    explained = engine.report(prompt("abcd"), num_loaded=num_hit * CHUNK, blocking=Absence.TOO_LATE)
    hits = {"memory": CHUNK} if num_hit else {}
    assert explained.tokens == hits | {"too_late": (3 - num_hit) * CHUNK, "new": CHUNK, "tail": 5}
    assert explained.common_tokens == 3 * CHUNK


def test_a_prompt_that_leaves_an_earlier_one_has_diverged():
    engine = Engine()
    engine.report(prompt("abc"))
    explained = engine.report(prompt("axc"), num_loaded=CHUNK)
    assert explained.tokens == {"memory": CHUNK, "diverged": 2 * CHUNK, "tail": 5}
    assert engine.causes.stats.diverged_tokens == {"256": 2 * CHUNK}
    (branch,) = engine.causes.branches.top(10)
    assert (branch.depth_tokens, branch.num_requests, branch.num_tokens) == (CHUNK, 1, 2 * CHUNK)


def test_tokens_of_documents_at_another_position_are_not_computed():
    """Neither the reason why chunks are absent nor a divergence applies to them."""
    engine = Engine()
    engine.report(prompt("abc"))
    explained = engine.report(prompt("axyz"), num_loaded=CHUNK, num_blended=2 * CHUNK + BLOCK)
    expected = {"memory": CHUNK, "blended": 2 * CHUNK + BLOCK, "diverged": CHUNK - BLOCK, "tail": 5}
    assert explained.tokens == expected
    assert engine.causes.stats.diverged_tokens == {"256": CHUNK - BLOCK}
    explained = engine.report(prompt("axyz"), num_blended=2 * CHUNK)
    assert explained.tokens == {"blended": 2 * CHUNK, "evicted": 2 * CHUNK, "tail": 5}
    assert engine.report(prompt("xa"), num_engine=CHUNK, num_blended=1 << 63).tokens == {
        "engine": CHUNK, "blended": CHUNK + 5
    }  # fmt: skip


def test_a_timestamp_in_the_first_chunk_is_a_divergence():
    engine = Engine()
    for second in range(10):
        explained = engine.report("sy" + str(second) + prompt("ab"))
    assert explained.tokens == {"diverged": 2 * CHUNK, "tail": 5 + 3 * BLOCK}
    assert explained.common_tokens == 2 * BLOCK
    assert engine.causes.stats.diverged_requests == {"64": 9}
    assert engine.causes.branches.top(1)[0].num_requests == 9


def test_chunks_of_a_request_that_just_began_are_being_stored():
    engine = Engine()
    engine.report(prompt("a"), time=1000.0)
    engine.report(prompt("ab"), num_loaded=CHUNK, time=2000.0)
    for time, cause in ((2000.5, "being_stored"), (2059.0, "being_stored"), (2061.0, "not_stored")):
        explained = engine.report(prompt("ab"), num_loaded=CHUNK, blocking=Absence.NOT_STORED, time=time)
        assert explained.tokens == {"memory": CHUNK, cause: CHUNK, "tail": 5}
    explained = engine.report(prompt("ab"), blocking=Absence.EVICTED, time=2061.0)
    assert explained.tokens == {"evicted": 2 * CHUNK, "tail": 5}


def test_tokens_in_the_engine_are_common_tokens():
    engine = Engine()
    assert engine.report("a" * 3, 2 * BLOCK).common_tokens == 2 * BLOCK


@pytest.mark.parametrize(
    ("num_keys", "fields", "tokens"),
    [
        # A lookup holds 4,096 keys of all KV groups, and an engine may load more chunks.
        pytest.param(2, {"num_hit_chunks": 5, "num_loaded_tokens": 4 * CHUNK, "num_engine_tokens": CHUNK,
                         "num_prompt_tokens": 6 * CHUNK + 5},
                     {"engine": CHUNK, "remote": CHUNK, "memory": 3 * CHUNK, "tail": CHUNK + 5},
                     id="loaded chunks after the last looked-up one count for memory"),
        pytest.param(4, {"num_hit_chunks": 3, "num_loaded_tokens": 2 * CHUNK},
                     {"engine": CHUNK, "remote": CHUNK, "memory": CHUNK, "new": CHUNK},
                     id="an engine that sends no tokens counts whole chunks"),
    ],
)  # fmt: skip
def test_chunks_count_although_the_report_lacks_keys_or_tokens(num_keys, fields, tokens):
    engine = Engine()
    keys = [b"n" * 32 + bytes([number]) * 32 for number in range(num_keys)]
    chains = Chains(CHUNK, (KVGroup(0, BLOCK, 4096),), (keys,))
    message = pb.Scheduled(num_engine_chunks=1, **fields)
    sources = find_sources(chains, message, {keys[1]: "remote"})
    engine.causes.note(UncountedRequest(0.0, "id", chains, message, sources, engine.history, EVICTED))
    engine.causes.settle()
    assert engine.causes.stats.cause_tokens == tokens


@given(
    st.lists(
        st.tuples(
            st.text("ab", max_size=70),
            st.integers(0, 2000),
            st.integers(0, 2000),
            st.integers(0, 600),
            st.integers(0, 2000),
        ),
        max_size=20,
    )
)
def test_causes_add_up_to_the_prompts_for_any_report(reports):
    engine = Engine()
    for text, num_engine, num_loaded, num_tail, num_blended in reports:
        explained = engine.report(text, num_engine, num_loaded, num_tail=num_tail, num_blended=num_blended)
        assert sum(explained.tokens.values()) == len(text) * BLOCK + num_tail
        assert all(number > 0 for number in explained.tokens.values())
        assert explained.tokens.keys() <= set(CAUSES)
    stats = engine.causes.stats
    assert sum(stats.cause_tokens.values()) == stats.prompt_tokens
    assert sum(stats.diverged_tokens.values()) <= stats.cause_tokens["diverged"]


def paused_engine() -> Engine:
    """An engine whose requests are counted only by its deferred calls."""
    engine = Engine()
    engine.causes.settle = lambda: None
    engine.causes.requests.append(None)
    return engine


def test_requests_are_counted_in_slices_after_the_call():
    engine = paused_engine()
    for _ in range(20):
        engine.report(prompt("a"))
    assert (engine.causes.stats.prompt_tokens, len(engine.deferred)) == (0, 1)
    run_deferred(engine)
    assert engine.causes.stats.prompt_tokens == 16 * (CHUNK + 5)
    assert engine.deferred[0][0] == 0.0  # a pause would bound the rate of requests
    run_deferred(engine)
    assert (engine.causes.stats.prompt_tokens, engine.deferred) == (20 * (CHUNK + 5), [])


def test_few_long_requests_are_counted_in_a_slice():
    engine = paused_engine()
    for _ in range(4):
        engine.report(prompt("abcdefgh" * 50))
    run_deferred(engine)
    assert len(engine.causes.requests) == 1 + 3


def test_a_request_that_cannot_be_counted_does_not_stop_the_others(monkeypatch):
    engine = paused_engine()
    engine.report(prompt("a"))
    engine.report(prompt("b"))
    monkeypatch.setattr(engine.causes, "_explain", Mock(side_effect=RuntimeError))
    with pytest.raises(RuntimeError):
        run_deferred(engine)
    monkeypatch.undo()
    run_deferred(engine)
    assert engine.causes.stats.prompt_tokens == CHUNK + 5


def test_a_request_is_counted_when_lower_tiers_have_answered():
    """Requests after it wait, because the history holds chunks in the order of requests."""
    engine = paused_engine()
    answer: Future[Blocking] = Future(loop=Mock())
    engine.history.note_found(chunk_names(block_keys(prompt("ab"))[15::16]))
    engine.report(prompt("ab"), blocking=Absence.TOO_LATE, late_blocking=answer)
    engine.report(prompt("c"))
    run_deferred(engine)
    assert (engine.causes.stats.prompt_tokens, engine.deferred[0][0] > 0) == (0, True)
    answer.set_result(EVICTED)
    run_deferred(engine)
    assert engine.causes.stats.cause_tokens == {"evicted": 2 * CHUNK, "new": CHUNK, "tail": 10}
    assert not engine.deferred


@pytest.mark.parametrize("is_closing", [False, True], ids=["the engine is dead", "the store closes"])
def test_a_request_without_an_answer_counts_with_the_reason_of_its_report(is_closing):
    engine = paused_engine()
    answer: Future[Blocking] = Future(loop=Mock())
    engine.history.note_found(chunk_names(block_keys(prompt("ab"))[15::16]))
    engine.report(prompt("ab"), blocking=Absence.TOO_LATE, late_blocking=answer)
    if is_closing:
        answer.cancel()
        run_deferred(engine)
    else:
        engine.causes.end_engine(b"")
    assert engine.causes.stats.cause_tokens == {"too_late": 2 * CHUNK, "tail": 5}


def test_branches_keep_those_with_the_most_tokens():
    engine = Engine()
    for number in range(1000):
        engine.causes.branches.note(number, 64, 1000 if number == 3 else 1)
    assert engine.causes.branches.top(1)[0].prefix == f"{3:016x}"
    assert len(engine.causes.branches.top(10_000)) <= 256


TWO_GROUPS = Chains(CHUNK, (KVGroup(0, BLOCK, 4096), KVGroup(1, BLOCK, 4096)), ([b"a", b"b"], [b"c", b"d"]))


def blocking_of(reasons: dict[bytes, Absence], num_hit: int = 1, stored: bytes = b"") -> Blocking:
    """Blocking chunk of two KV groups, with the reason of each row. ``stored``: rows that were in a tier."""
    return find_blocking(
        TWO_GROUPS, num_hit, "r", lambda key, request: reasons[key], lambda key: key in stored
    )


def test_the_group_whose_row_is_absent_blocks():
    reasons = {b"b": Absence.BEING_STORED, b"d": Absence.EVICTED}
    assert blocking_of(reasons).absence is Absence.EVICTED
    assert blocking_of(reasons, num_hit=2).absence is Absence.BEING_STORED
    assert blocking_of({b"b": Absence.TOO_LATE, b"d": Absence.INVALID}).absence is Absence.INVALID
    assert blocking_of({b"b": Absence.BEING_STORED, b"d": Absence.TOO_LATE}).absence is Absence.TOO_LATE


def test_a_chunk_may_still_be_computed_if_no_group_ever_stored_it():
    reasons = {b"b": Absence.NOT_STORED, b"d": Absence.BEING_STORED}
    assert blocking_of(reasons) == Blocking(Absence.NOT_STORED, True)
    assert blocking_of(reasons, stored=b"d") == Blocking(Absence.NOT_STORED, False)
    assert not blocking_of({b"b": Absence.EVICTED, b"d": Absence.NOT_STORED}).is_unstored
