"""What sidecars answer: read as it was told, or refused whole."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmcache_operator.scaling.answers import (
    Counts,
    RefusedAnswerError,
    figures,
    next_request,
    samples,
)

from lmcache.curves import HASHES
from testing.workloads.requests import Request, Workload
from testing.workloads.sidecars import Sidecars
from testing.workloads.tiers import Service

KEYS = st.integers(0, HASHES - 1)
REQUESTS = st.lists(st.lists(KEYS, min_size=1, max_size=5), max_size=8)


def sidecars(requests: list[list[int]]) -> Sidecars:
    workload = Workload([])
    found = Sidecars(workload, Service(1, 0, 4), 1, 1 << 30)
    for time, keys in enumerate(requests):
        found.serve(0, Request(time + 1000.25, 0, tuple(keys)))
    return found


@given(REQUESTS, st.integers(0, 10), st.sampled_from([HASHES, HASHES // 2, HASHES // 8]))
def test_what_was_told_is_read(requests, since, below):
    told = samples(json.loads(json.dumps(sidecars(requests).samples(0, 2000.0, since, below))))
    position, expected = 0, []
    for time, keys in enumerate(requests):
        if position >= since:
            kept = [key for key in keys[:0:-1] if key < below] + [keys[0]]
            expected.append((time + 1000.25, tuple(kept)))
        position += len(keys)
    assert list(told.requests()) == expected
    assert told.next == position
    assert told.rate == pytest.approx(below / HASHES)


@given(REQUESTS, st.integers(0, 20))
def test_of_many_requests_the_latest_are_read(requests, most):
    answer = sidecars(requests).samples(0, 2000.0)
    whole, part = samples(answer), samples(answer, most)
    told, left = list(part.requests()), list(whole.requests())
    assert len(part.keys) <= most
    assert told == left[len(left) - len(told) :]
    columns = {name: getattr(part, name) for name in ("times", "sizes", "keys")}
    assert part == whole._replace(num_lost=len(whole.keys) - len(part.keys), **columns)


@given(REQUESTS)
def test_counts_are_those_of_all_tiers(requests):
    told = sidecars(requests).stats(0)
    found = figures(told)
    assert found.counts.looked_up == 512 * sum(map(len, requests))
    assert found.counts.memory == told["lookups"]["hit_tokens"].get("memory", 0)
    assert found.counts == Counts(found.counts.looked_up, memory=found.counts.memory)


WRONG = [
    None, True, -1, 1 << 70, math.nan, math.inf, "x", "", [], {}, [1.5], [-1], ["1"], [[1]], [1 << 70],
]  # fmt: skip


@pytest.mark.parametrize("answer", [samples, figures])
def test_whatever_else_is_told_is_refused_or_read_and_never_more(answer):
    """Each field in turn is something else, or missing."""
    told = sidecars([[1, 2, 3], [4]])
    whole = told.samples(0, 2000.0) if answer is samples else told.stats(0)
    for path in paths(whole):
        for value in [*WRONG, KeyError]:
            with contextlib.suppress(RefusedAnswerError):
                answer(changed(whole, path, value))
    answer(whole)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 2), ("now", 1.0), ("t0", 2000.5), ("t0", 2000.0 - 8 * 86400), ("t0", math.nan),
        ("below", 0), ("below", 1), ("row_bytes", 0), ("row_bytes", -5), ("chunk_tokens", 0),
        ("namespace", ""), ("namespace", "x" * 200), ("num", [3]), ("num", [3, 2]), ("num", [4, 0]),
        ("num", [5, -1]), ("ms", [0, 10**9]), ("key", "0" * 63), ("key", "0" * 63 + "g"), ("next", 1),
        ("key", "é" * 64), ("key", "0" * 48 + " " * 16), ("key", "0" * 60 + "    "),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(field, value):
    whole = sidecars([[1, 2, 3], [4]]).samples(0, 2000.0)
    samples(whole)
    with pytest.raises(RefusedAnswerError):
        samples(whole | {field: value})


def test_a_size_of_memory_is_one_that_a_status_can_hold():
    whole = sidecars([[1, 2]]).stats(0)
    with pytest.raises(RefusedAnswerError, match="size_bytes"):
        figures(whole | {"memory": {"size_bytes": 1 << 62}})


def test_more_hits_than_lookups_are_refused():
    whole = sidecars([[1, 2], [1, 2]]).stats(0)
    whole["lookups"]["hit_tokens"]["engine"] = 513 * 2
    with pytest.raises(RefusedAnswerError, match="more tokens were found than looked up"):
        figures(whole)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["memory", "lookups", "version", "next", "key"]), inner)
        ),
        max_leaves=8,
    )
)
def test_no_answer_raises_anything_else(answer):
    for read in (samples, figures):
        with pytest.raises(RefusedAnswerError):
            read(answer)
    following = next_request(answer)
    assert following is None or 0 <= following < 1 << 63


def paths(value: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    inner = value.items() if isinstance(value, dict) else ()
    return [path for key, one in inner for path in [(*prefix, key), *paths(one, (*prefix, key))]]


def changed(value: dict[str, Any], path: tuple[str, ...], new: Any) -> dict[str, Any]:
    key, *rest = path
    if rest:
        return value | {key: changed(value[key], tuple(rest), new)}
    without = {name: one for name, one in value.items() if name != key}
    return without if new is KeyError else without | {key: new}
