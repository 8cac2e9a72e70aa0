"""The lm:// messages, byte for byte, and the stream under them."""

from __future__ import annotations

import socket
import struct
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache.protocol import (
    MAX_KEY_LENGTH,
    MAX_LENGTH,
    ClientMetaMessage,
    Constants,
    ServerMetaMessage,
    Stream,
)


@pytest.fixture
def pair(request):
    """A stream, and the socket at its other end."""
    near, far = socket.socketpair()
    stream = Stream(near, timeout_seconds=getattr(request, "param", 60))
    yield stream, far
    stream.close()
    far.close()


impatient = pytest.mark.parametrize("pair", [0.2], indirect=True)


def test_a_request_is_the_documents_158_bytes():
    raw = ClientMetaMessage(Constants.CLIENT_PUT, "vllm@m@1@0@häsh", 5).serialize()
    assert raw == struct.pack("ii", 1, 5) + "vllm@m@1@0@häsh".encode().ljust(150, b" ")
    assert len(raw) == ClientMetaMessage.packlength() == 158


def test_a_reply_is_the_documents_8_bytes():
    assert ServerMetaMessage(Constants.SERVER_SUCCESS, 7).serialize() == struct.pack("ii", 200, 7)
    assert ServerMetaMessage.packlength() == 8


def test_numbers_are_the_documents():
    commands = (Constants.CLIENT_PUT, Constants.CLIENT_GET, Constants.CLIENT_EXIST, Constants.CLIENT_LIST)
    assert commands == (1, 2, 3, 4)
    assert (Constants.SERVER_SUCCESS, Constants.SERVER_FAIL, MAX_KEY_LENGTH) == (200, 400, 150)


@given(st.integers(-(2**31), 2**31 - 1), st.text(max_size=40), st.integers(0, MAX_LENGTH))
def test_a_request_comes_back_or_is_refused_by_its_sender(command, key, length):
    message = ClientMetaMessage(command, key, length)
    try:
        raw = message.serialize()
    except ValueError:
        is_short = len(key.encode("utf-8", "surrogatepass")) <= MAX_KEY_LENGTH
        assert not is_short or key != key.rstrip(" ") or "\n" in key
        return
    assert ClientMetaMessage.deserialize(raw) == message


@pytest.mark.parametrize("key", ["k" * 151, "ä" * 76, "ends with a space ", "two\nkeys"])
def test_a_key_that_would_not_come_back_is_refused(key):
    with pytest.raises(ValueError, match="at most 150 bytes"):
        ClientMetaMessage(1, key, 0).serialize()


@pytest.mark.parametrize("length", [-1, 1 << 31])
def test_a_length_that_can_not_be_sent_is_refused(length):
    with pytest.raises(ValueError, match="can't be sent"):
        ClientMetaMessage(1, "k", length).serialize()


@given(st.binary(max_size=200) | st.binary(min_size=158, max_size=158) | st.binary(min_size=8, max_size=8))
def test_any_bytes_are_a_message_or_a_value_error(raw):
    for kind in (ClientMetaMessage, ServerMetaMessage):
        try:
            message = kind.deserialize(raw)
        except ValueError:
            continue
        assert message.length >= 0


def test_large_messages_arrive_whole(pair):
    stream, far = pair
    payload = bytes(range(256)) * 8192
    with_parts = threading.Thread(target=lambda: stream.send(payload[:10], payload[10:]))
    with_parts.start()
    received = bytearray()
    while len(received) < len(payload):
        received += far.recv(1 << 16)
    with_parts.join()
    assert received == payload


def test_short_reads_are_joined(pair):
    stream, far = pair

    def trickle():
        for byte in b"abcdef":
            far.sendall(bytes([byte]))
            time.sleep(0.001)

    thread = threading.Thread(target=trickle)
    thread.start()
    assert stream.receive(6) == b"abcdef"
    thread.join()


def test_nothing_is_read_for_nothing(pair):
    assert pair[0].receive(0) == b""


@impatient
def test_a_silent_peer_is_a_time_out(pair):
    with pytest.raises(TimeoutError):
        pair[0].receive(1)


@impatient
def test_a_peer_that_trickles_is_a_time_out(pair):
    stream, far = pair
    is_over = threading.Event()

    def trickle():
        while not is_over.wait(0.01):
            far.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    with pytest.raises(TimeoutError):
        stream.receive(100_000)
    is_over.set()
    thread.join()


@impatient
def test_a_peer_that_takes_nothing_is_a_time_out(pair):
    with pytest.raises(TimeoutError):
        pair[0].send(bytes(8 << 20))


def test_a_peer_that_goes_is_a_connection_error(pair):
    stream, far = pair
    far.sendall(b"half")
    far.close()
    with pytest.raises(ConnectionError):
        stream.receive(8)


def test_a_stream_is_quiet_until_something_comes_or_it_ends(pair):
    stream, far = pair
    assert stream.is_quiet()
    far.sendall(b"x")
    assert stream.wait(60)
    assert not stream.is_quiet()
    assert stream.receive(1) == b"x"
    assert not stream.wait(0.01)
    far.close()
    assert not stream.wait(60)
    assert not stream.is_quiet()


def test_what_has_come_is_read_after_reading_was_ended(pair):
    stream, far = pair
    far.sendall(b"x")
    stream.end_reading()
    assert stream.wait(60)
    assert stream.receive(1) == b"x"
    assert not stream.wait(60)
