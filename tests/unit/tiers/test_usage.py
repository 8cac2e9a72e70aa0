"""What a server's INFO says of how soon it forgets."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from lmcache.tiers.errors import ServerError
from lmcache.tiers.remote.usage import Usage

MEMORY = b"# Memory\r\nused_memory:1000\r\nused_memory_human:1K\r\nmaxmemory:8000\r\n"
STATS = b"# Stats\r\ntotal_net_input_bytes:500\r\nevicted_keys:7\r\n"


def usage(at: float = 0.0, received: int = 0, most: int = 8000) -> Usage:
    return Usage(at, 1000, most, 7, received)


def test_what_a_server_says_is_read():
    assert Usage.parse([b"PONG", MEMORY, STATS], 3.0) == usage(3.0, 500)


@pytest.mark.parametrize("replies", [[], [b"PONG", MEMORY], [b"PONG", ServerError("NOPERM no"), STATS]])
def test_one_that_does_not_say_all_of_it_says_nothing(replies):
    assert Usage.parse(replies, 0.0) is None


@given(st.lists(st.binary() | st.none() | st.integers() | st.just(MEMORY)))
def test_no_answer_is_believed_that_is_none(replies):
    assert Usage.parse(replies, 0.0) is None


@pytest.mark.parametrize(
    ("later", "seconds"),
    [
        (usage(10.0, 4000), 20.0),
        (usage(10.0, 16000), 5.0),
        (usage(10.0, 0), math.inf),
        (usage(10.0, 4000, most=0), math.inf),
    ],
)
def test_a_value_stays_as_long_as_filling_the_server_takes(later, seconds):
    assert later.residence_seconds(usage()) == seconds


def test_a_restarted_server_begins_anew():
    assert usage(10.0, 5).residence_seconds(usage(0.0, 4000)) == math.inf
