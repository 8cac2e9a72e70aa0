"""Commands that a peer server reads: any split into packets, and bytes that are no commands."""

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from lmcache_sidecar.peer_server.requests import MAX_WORD_BYTES, MAX_WORDS, BadRequestError, Requests
from tests.harness.tiers.peer_rows import command

WORDS = st.lists(st.binary(max_size=40), min_size=1, max_size=MAX_WORDS)


def reader(*packets):
    remaining = iter(packets)

    def receive(limit):
        packet = next(remaining)
        assert 0 < len(packet) <= limit
        return packet

    return Requests(receive)


def read_all(requests, number):
    commands = []
    while len(commands) < number:
        commands += requests.read()
    return commands


@given(st.lists(WORDS, min_size=1, max_size=6), st.data())
def test_commands_are_read_however_they_arrive(commands, data):
    sent = b"".join(itertools.starmap(command, commands))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sent) - 1), max_size=8)))
    packets = [sent[start:end] for start, end in itertools.pairwise([0, *cuts, len(sent)])]
    assert read_all(reader(*packets), len(commands)) == commands


def test_commands_that_arrive_together_are_returned_together():
    requests = reader(command(b"PING") * 3 + command(b"HGET", b"a", b"b")[:-1], b"\n")
    assert requests.read() == [[b"PING"]] * 3
    assert requests.read() == [[b"HGET", b"a", b"b"]]


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"*0\r\n",
        b"*-1\r\n",
        b"*%d\r\n" % (MAX_WORDS + 1),
        b"*99999999999",
        b"*1\r\n:1\r\n",
        b"*1\r\n$-1\r\n",
        b"*1\r\n$%d\r\n" % (MAX_WORD_BYTES + 1),
        b"*1\r\n$4\r\nPINGxx",
        b"*1\r\n$ 4\r\nPING\r\n",
        b"\r\n" * 10,
    ],
)
def test_other_bytes_are_refused(sent):
    with pytest.raises(BadRequestError):
        reader(sent).read()
