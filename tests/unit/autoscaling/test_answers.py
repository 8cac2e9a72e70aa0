"""Validation of sidecars' answers: samples and figures are read completely, or refused."""

import contextlib
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_operator.autoscaling.intake.answers import Counts, figures
from lmcache_store.curves import HASHES
from lmcache_store.curves.answers import InvalidAnswerError, samples
from testing.workloads.requests import Request, Workload
from testing.workloads.sidecars import Sidecars
from testing.workloads.tiers import Service

KEYS = st.integers(0, HASHES - 1)
REQUESTS = st.lists(st.lists(KEYS, min_size=1, max_size=5), max_size=8)


def sidecars(requests: list[list[int]]) -> Sidecars:
    workload = Workload([])
    simulated = Sidecars(workload, Service(1, 0, 4), 1, 1 << 30)
    for time, keys in enumerate(requests):
        simulated.serve(0, Request(time + 1000.25, 0, tuple(keys)))
    return simulated


@given(REQUESTS, st.integers(0, 10), st.sampled_from([HASHES, HASHES // 2, HASHES // 8]))
def test_samples_reads_the_answer_of_a_sidecar(requests, since, below):
    parsed = samples(json.loads(json.dumps(sidecars(requests).samples(0, 2000.0, since, below))))
    position, expected = 0, []
    for time, keys in enumerate(requests):
        if position >= since:
            sampled_keys = [key for key in keys[:0:-1] if key < below] + [keys[0]]
            expected.append((time + 1000.25, tuple(sampled_keys)))
        position += len(keys)
    assert (list(parsed.requests()), parsed.next) == (expected, position)
    assert parsed.rate == pytest.approx(below / HASHES)


@given(REQUESTS, st.integers(0, 20))
def test_samples_keeps_the_latest_requests_within_the_limit(requests, max_keys):
    answer = sidecars(requests).samples(0, 2000.0)
    whole, part = samples(answer), samples(answer, max_keys)
    partial_requests, all_requests = list(part.requests()), list(whole.requests())
    assert len(part.keys) <= max_keys
    assert partial_requests == all_requests[len(all_requests) - len(partial_requests) :]
    columns = {name: getattr(part, name) for name in ("times", "sizes", "keys")}
    assert part == whole._replace(num_lost=len(whole.keys) - len(part.keys), **columns)


@given(REQUESTS)
def test_figures_counts_lookups_and_hits(requests):
    stats = sidecars(requests).stats(0)
    statistics = figures(stats)
    assert statistics.counts.looked_up == 512 * sum(map(len, requests))
    assert statistics.counts.memory == stats["lookups"]["hit_tokens"].get("memory", 0)
    assert statistics.counts == Counts(statistics.counts.looked_up, memory=statistics.counts.memory)


WRONG = [
    None, True, -1, 1 << 70, math.nan, math.inf, "x", "", [], {}, [1.5], [-1], ["1"], [[1]], [1 << 70],
]  # fmt: skip


@pytest.mark.parametrize("answer", [samples, figures])
def test_wrong_field_is_refused_or_ignored(answer):
    """Each field in turn gets a wrong value, or is missing."""
    simulated = sidecars([[1, 2, 3], [4]])
    whole = simulated.samples(0, 2000.0) if answer is samples else simulated.stats(0)
    for path in paths(whole):
        for value in [*WRONG, KeyError]:
            with contextlib.suppress(InvalidAnswerError):
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
def test_samples_refuses_inconsistent_fields(field, value):
    whole = sidecars([[1, 2, 3], [4]]).samples(0, 2000.0)
    samples(whole)
    with pytest.raises(InvalidAnswerError):
        samples(whole | {field: value})


def test_figures_refuses_a_memory_size_that_no_status_can_hold():
    whole = sidecars([[1, 2]]).stats(0)
    with pytest.raises(InvalidAnswerError, match="size_bytes"):
        figures(whole | {"memory": {"size_bytes": 1 << 62}})


def test_figures_refuses_more_hits_than_lookups():
    whole = sidecars([[1, 2], [1, 2]]).stats(0)
    whole["lookups"]["hit_tokens"]["engine"] = 513 * 2
    with pytest.raises(InvalidAnswerError, match="hit_tokens exceed lookup_tokens"):
        figures(whole)


def paths(value: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    inner = value.items() if isinstance(value, dict) else ()
    return [path for key, child in inner for path in [(*prefix, key), *paths(child, (*prefix, key))]]


def changed(value: dict[str, Any], path: tuple[str, ...], new: Any) -> dict[str, Any]:
    key, *remaining_path = path
    if remaining_path:
        return value | {key: changed(value[key], tuple(remaining_path), new)}
    without = {name: child for name, child in value.items() if name != key}
    return without if new is KeyError else without | {key: new}
