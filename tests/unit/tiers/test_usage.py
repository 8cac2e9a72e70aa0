"""Residence time of values, computed from a server's INFO."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from lmcache_store.tiers.errors import ServerError
from lmcache_store.tiers.remote.usage import Usage

MEMORY = b"# Memory\r\nused_memory:1000\r\nused_memory_human:1K\r\nmaxmemory:8000\r\n"
STATS = b"# Stats\r\ntotal_net_input_bytes:500\r\nevicted_keys:7\r\n"


def usage(time: float = 0.0, received: int = 0, max_memory: int = 8000) -> Usage:
    return Usage(time, 1000, max_memory, 7, received)


def test_parses_info_replies():
    assert Usage.parse([b"PONG", MEMORY, STATS], 3.0) == usage(3.0, 500)


@pytest.mark.parametrize("replies", [[], [b"PONG", MEMORY], [b"PONG", ServerError("NOPERM no"), STATS]])
def test_incomplete_replies_give_no_usage(replies):
    assert Usage.parse(replies, 0.0) is None


@given(st.lists(st.binary() | st.none() | st.integers() | st.just(MEMORY)))
def test_invalid_replies_give_no_usage(replies):
    assert Usage.parse(replies, 0.0) is None


@pytest.mark.parametrize(
    ("later", "seconds"),
    [
        (usage(10.0, 4000), 20.0),
        (usage(10.0, 16000), 5.0),
        (usage(10.0, 0), math.inf),
        (usage(10.0, 4000, max_memory=0), math.inf),
    ],
)
def test_residence_is_the_time_to_fill_the_server(later, seconds):
    assert later.residence_seconds(usage()) == seconds


def test_restarted_server_starts_a_new_measurement():
    assert usage(10.0, 5).residence_seconds(usage(0.0, 4000)) == math.inf
