"""What is told of a decision, and what of it survives."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmcache_operator.autoscaling.report import (
    MAX_STATE_BYTES,
    Choice,
    Report,
    restore,
    save,
    steady,
    tier_status,
)
from lmcache_operator.autoscaling.state import Decision, Point
from lmcache_operator.autoscaling.tier import GIB

CHOICES = st.none() | st.builds(Choice, st.integers(1, 1 << 44), st.integers(1, 1 << 44))
GROW = Decision(
    size=64 * GIB, target=108 * GIB, recommended=108 * GIB, next=108 * GIB, reason="108Gi instead of 64Gi: "
    "16.2 % more prompt tokens hit", limited_by="Max", saving=0.16, saving_error=0.04,
)  # fmt: skip
POINTS = [Point(64 * GIB, 0.4, 0.38, 0.42, 0.0), Point(108 * GIB, 0.562, 0.55, 0.58, 0.16)]


@given(memory=CHOICES, shards=CHOICES, state=st.text(max_size=200))
def test_what_is_saved_is_restored(memory: Choice | None, shards: Choice | None, state: str) -> None:
    assert restore(save(Report({}, memory, shards, state))) == (memory, shards, state)


@pytest.mark.parametrize(
    "edit",
    [
        lambda data: data | {"state": "{}"},
        lambda data: data | {"sizes": data["sizes"].replace("108", "999")},
        lambda data: {key: value for key, value in data.items() if key != "digest"},
        lambda data: data | {"digest": None},
        lambda data: {},
    ],
)
def test_what_was_edited_is_not_believed(edit: Any) -> None:
    data = save(Report({}, Choice(108, 64), None, "what was counted"))
    assert restore(data).memory == Choice(108, 64)
    with pytest.raises(ValueError, match=r"edited|missing"):
        restore(edit(data))


def test_too_much_is_refused_when_it_is_made_and_not_when_it_is_written() -> None:
    Report({}, state="x" * MAX_STATE_BYTES)
    with pytest.raises(ValueError, match="65537 bytes"):
        Report({}, state="x" * (MAX_STATE_BYTES + 1))


def test_a_decision_is_told_in_sizes_and_money() -> None:
    assert tier_status(GROW, POINTS) == {
        "current": "64Gi", "recommended": "108Gi", "next": "108Gi",
        "reason": GROW.reason, "limitedBy": "Max",
        "saving": {"usdPerHour": "0.160", "low": "0.120", "high": "0.200"},
        "curve": [
            {"size": "64Gi", "hit": "0.400", "low": "0.380", "high": "0.420", "netPerHour": "0.000"},
            {"size": "108Gi", "hit": "0.562", "low": "0.550", "high": "0.580", "netPerHour": "0.160"},
        ],
    }  # fmt: skip


def test_shards_are_told_by_their_number() -> None:
    told = tier_status(GROW, POINTS, shard_bytes=4 * GIB)
    assert (told["current"], told["recommended"], told["curve"][0]["size"]) == (16, 27, "64Gi")


def test_what_is_no_figure_is_not_told() -> None:
    unknown = replace(GROW, size=math.nan, saving=math.nan)
    told = tier_status(unknown, [POINTS[0]._replace(net=math.inf)])
    assert told.keys() == {"recommended", "next", "reason", "limitedBy"}


def test_a_status_is_told_anew_only_when_it_says_something_else() -> None:
    told = {"observedAt": "2026-01-01T00:00:00Z", "samples": 1000, "memory": tier_status(GROW, POINTS)}

    def again(**changes: Any) -> bool:
        more = {"observedAt": "2026-01-01T00:15:00Z", "samples": 1400}
        found = told | more | {"memory": told["memory"] | changes}
        kept = steady(told, found)
        assert kept in (told, found)
        return kept is found

    assert not again()
    assert not again(reason="108Gi instead of 64Gi: 16.4 % more prompt tokens hit")
    assert not again(saving={"usdPerHour": "0.17", "low": "0.12", "high": "0.21"})
    assert again(saving={"usdPerHour": "0.19", "low": "0.12", "high": "0.20"})
    assert again(reason="nothing was looked up")
    assert again(recommended="110Gi")
    assert again(limitedBy="None")
    assert again(curve=told["memory"]["curve"][:1])
    assert again(keysInSize=1600)


def test_a_loss_of_nothing_has_no_sign() -> None:
    told = tier_status(replace(GROW, saving=-0.0001, saving_error=0.0), [POINTS[0]._replace(net=-0.0001)])
    assert told["curve"][0]["netPerHour"] == told["saving"]["usdPerHour"] == "0.000"
