"""Bytes of lm:// messages, and the stream that carries them."""

import contextlib
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache.protocol import (
    MAX_KEY_LENGTH,
    MAX_LENGTH,
    ClientMetaMessage,
    Constants,
    ServerMetaMessage,
    TimedStream,
)


def test_request_has_the_documented_158_bytes():
    raw = ClientMetaMessage(Constants.CLIENT_PUT, "vllm@m@1@0@häsh", 5).serialize()
    assert raw == struct.pack("ii", 1, 5) + "vllm@m@1@0@häsh".encode().ljust(150, b" ")
    assert len(raw) == ClientMetaMessage.packlength() == 158


def test_reply_has_the_documented_8_bytes():
    assert ServerMetaMessage(Constants.SERVER_SUCCESS, 7).serialize() == struct.pack("ii", 200, 7)
    assert ServerMetaMessage.packlength() == 8


def test_constants_have_the_documented_values():
    commands = (Constants.CLIENT_PUT, Constants.CLIENT_GET, Constants.CLIENT_EXIST, Constants.CLIENT_LIST)
    assert commands == (1, 2, 3, 4)
    assert (Constants.SERVER_SUCCESS, Constants.SERVER_FAIL, MAX_KEY_LENGTH) == (200, 400, 150)


@given(st.integers(-(2**31), 2**31 - 1), st.text(max_size=40), st.integers(0, MAX_LENGTH))
def test_request_survives_a_round_trip_or_is_refused_by_the_sender(command, key, length):
    message = ClientMetaMessage(command, key, length)
    try:
        raw = message.serialize()
    except ValueError:
        is_short = len(key.encode("utf-8", "surrogatepass")) <= MAX_KEY_LENGTH
        assert not is_short or key != key.rstrip(" ") or "\n" in key
        return
    assert ClientMetaMessage.deserialize(raw) == message


@pytest.mark.parametrize(
    ("key", "length", "message"),
    [
        *((key, 0, "at most 150 bytes") for key in ("k" * 151, "ä" * 76, "ends with a space ", "two\nkeys")),
        *(("k", length, "a payload must have 0 to 2147483647 bytes") for length in (-1, 1 << 31)),
    ],
)
def test_refuses_keys_and_lengths_unsafe_for_transfer(key, length, message):
    with pytest.raises(ValueError, match=message):
        ClientMetaMessage(1, key, length).serialize()


@given(st.binary(max_size=200) | st.binary(min_size=158, max_size=158) | st.binary(min_size=8, max_size=8))
def test_any_bytes_parse_or_raise_value_error(raw):
    for kind in (ClientMetaMessage, ServerMetaMessage):
        with contextlib.suppress(ValueError):
            assert kind.deserialize(raw).length >= 0


def test_send_to_a_peer_without_reads_times_out():
    local, remote = socket.socketpair()
    stream = TimedStream(local, timeout_seconds=0.2)
    with remote, contextlib.closing(stream), pytest.raises(TimeoutError):
        stream.send(bytes(8 << 20))
