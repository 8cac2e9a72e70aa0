"""Bytes of lm:// messages, and the stream that carries them."""

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
    """Return a stream and the socket at its other end."""
    local, remote = socket.socketpair()
    stream = Stream(local, timeout_seconds=getattr(request, "param", 60))
    yield stream, remote
    stream.close()
    remote.close()


short_timeout = pytest.mark.parametrize("pair", [0.2], indirect=True)


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


@pytest.mark.parametrize("key", ["k" * 151, "ä" * 76, "ends with a space ", "two\nkeys"])
def test_refuses_keys_unsafe_for_transfer(key):
    with pytest.raises(ValueError, match="at most 150 bytes"):
        ClientMetaMessage(1, key, 0).serialize()


@pytest.mark.parametrize("length", [-1, 1 << 31])
def test_refuses_invalid_payload_lengths(length):
    with pytest.raises(ValueError, match="a payload must have 0 to 2147483647 bytes"):
        ClientMetaMessage(1, "k", length).serialize()


@given(st.binary(max_size=200) | st.binary(min_size=158, max_size=158) | st.binary(min_size=8, max_size=8))
def test_any_bytes_parse_or_raise_value_error(raw):
    for kind in (ClientMetaMessage, ServerMetaMessage):
        try:
            message = kind.deserialize(raw)
        except ValueError:
            continue
        assert message.length >= 0


def test_large_messages_arrive_complete(pair):
    stream, remote = pair
    payload = bytes(range(256)) * 8192
    sender = threading.Thread(target=lambda: stream.send(payload[:10], payload[10:]))
    sender.start()
    received = bytearray()
    while len(received) < len(payload):
        received += remote.recv(1 << 16)
    sender.join()
    assert received == payload


def test_short_reads_are_joined(pair):
    stream, remote = pair

    def trickle():
        for byte in b"abcdef":
            remote.sendall(bytes([byte]))
            time.sleep(0.001)  # real time: the reader waits between two bytes

    thread = threading.Thread(target=trickle)
    thread.start()
    assert stream.receive(6) == b"abcdef"
    thread.join()


def test_receiving_zero_bytes_does_not_read(pair):
    assert pair[0].receive(0) == b""


@short_timeout
def test_receive_from_a_silent_peer_times_out(pair):
    with pytest.raises(TimeoutError):
        pair[0].receive(1)


@short_timeout
def test_receive_from_a_very_slow_peer_times_out(pair):
    stream, remote = pair
    is_over = threading.Event()

    def trickle():
        while not is_over.wait(0.01):
            remote.sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    with pytest.raises(TimeoutError):
        stream.receive(100_000)
    is_over.set()
    thread.join()


@short_timeout
def test_send_to_a_peer_without_reads_times_out(pair):
    with pytest.raises(TimeoutError):
        pair[0].send(bytes(8 << 20))


def test_closed_peer_raises_connection_error(pair):
    stream, remote = pair
    remote.sendall(b"half")
    remote.close()
    with pytest.raises(ConnectionError):
        stream.receive(8)


def test_stream_is_quiet_until_bytes_arrive_or_the_peer_closes(pair):
    stream, remote = pair
    assert stream.is_quiet()
    remote.sendall(b"x")
    assert stream.wait(60)
    assert not stream.is_quiet()
    assert stream.receive(1) == b"x"
    assert not stream.wait(0.01)
    remote.close()
    assert not stream.wait(60)
    assert not stream.is_quiet()


def test_received_bytes_are_readable_after_end_reading(pair):
    stream, remote = pair
    remote.sendall(b"x")
    stream.end_reading()
    assert stream.wait(60)
    assert stream.receive(1) == b"x"
    assert not stream.wait(60)
