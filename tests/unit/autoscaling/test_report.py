"""Reports of decisions: status fields, and the state that survives a restart."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_operator.policy.report import (
    MAX_STATE_BYTES,
    Choice,
    Report,
    restore,
    save,
    steady,
    tier_status,
)
from lmcache_operator.policy.state import Decision, Point
from lmcache_operator.policy.tier import GIB

CHOICES = st.none() | st.builds(Choice, st.integers(1, 1 << 44), st.integers(1, 1 << 44))
GROW = Decision(
    size=64 * GIB, target=108 * GIB, recommended=108 * GIB, next=108 * GIB, reason="108Gi instead of 64Gi: "
    "16.2 percentage points more hits", limited_by="Max", saving=0.16, saving_error=0.04,
)  # fmt: skip
POINTS = [Point(64 * GIB, 0.4, 0.38, 0.42, 0.0), Point(108 * GIB, 0.562, 0.55, 0.58, 0.16)]


@given(memory=CHOICES, shards=CHOICES, state=st.text(max_size=200))
def test_restore_returns_saved_choices_and_state(
    memory: Choice | None, shards: Choice | None, state: str
) -> None:
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
def test_restore_refuses_edited_data(edit: Any) -> None:
    data = save(Report({}, Choice(108, 64), None, "what was counted"))
    assert restore(data).memory == Choice(108, 64)
    with pytest.raises(ValueError, match=r"edited|incomplete"):
        restore(edit(data))


def test_report_refuses_too_large_state() -> None:
    Report({}, state="x" * MAX_STATE_BYTES)
    with pytest.raises(ValueError, match="65537 bytes"):
        Report({}, state="x" * (MAX_STATE_BYTES + 1))


def test_tier_status_contains_sizes_and_money() -> None:
    assert tier_status(GROW, POINTS) == {
        "current": "64Gi", "recommended": "108Gi", "next": "108Gi",
        "reason": GROW.reason, "limitedBy": "Max",
        "saving": {"usdPerHour": "0.160", "low": "0.120", "high": "0.200"},
        "curve": [
            {"size": "64Gi", "hit": "0.400", "low": "0.380", "high": "0.420", "netPerHour": "0.000"},
            {"size": "108Gi", "hit": "0.562", "low": "0.550", "high": "0.580", "netPerHour": "0.160"},
        ],
    }  # fmt: skip


def test_tier_status_of_shards_contains_their_number() -> None:
    status = tier_status(GROW, POINTS, shard_bytes=4 * GIB)
    assert (status["current"], status["recommended"], status["curve"][0]["size"]) == (16, 27, "64Gi")


def test_tier_status_omits_infinite_and_nan_values() -> None:
    unknown = replace(GROW, size=math.nan, saving=math.nan)
    status = tier_status(unknown, [POINTS[0]._replace(net=math.inf)])
    assert status.keys() == {"recommended", "next", "reason", "limitedBy"}


def test_status_is_updated_only_by_significant_changes() -> None:
    old_status: dict[str, Any] = {
        "observedAt": "2026-01-01T00:00:00Z",
        "samples": 1000,
        "memory": tier_status(GROW, POINTS),
    }

    def is_updated(**changes: Any) -> bool:
        counters = {"observedAt": "2026-01-01T00:15:00Z", "samples": 1400}
        new_status = old_status | counters | {"memory": old_status["memory"] | changes}
        reported = steady(old_status, new_status)
        assert reported in (old_status, new_status)
        return reported is new_status

    assert not is_updated()
    assert not is_updated(reason="108Gi instead of 64Gi: 16.4 percentage points more hits")
    assert not is_updated(saving={"usdPerHour": "0.17", "low": "0.12", "high": "0.21"})
    assert is_updated(saving={"usdPerHour": "0.19", "low": "0.12", "high": "0.20"})
    assert is_updated(reason="no lookups were counted")
    assert is_updated(recommended="110Gi")
    assert is_updated(limitedBy="None")
    assert is_updated(curve=old_status["memory"]["curve"][:1])
    assert is_updated(keysInSize=1600)


def test_rounded_zero_has_no_sign() -> None:
    status = tier_status(replace(GROW, saving=-0.0001, saving_error=0.0), [POINTS[0]._replace(net=-0.0001)])
    assert status["curve"][0]["netPerHour"] == status["saving"]["usdPerHour"] == "0.000"
