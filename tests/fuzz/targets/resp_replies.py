"""Any reply of a Redis server ends in a value or in a declared error, and a load never accepts wrong bytes.

Input: the number of an operation, a flag for ASKING, and the bytes that the server sends before it closes the
connection.
"""

import contextlib
import socket
from unittest import mock

from lmcache_store.common.sockets import Stream
from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.errors import InvalidObjectError, TierError
from lmcache_store.tiers.remote import marks, objects, resp
from lmcache_store.tiers.remote.address import Address, Endpoint
from tests.fuzz.bytes_input import BytesInput
from tests.fuzz.target import Target

OBJECT = ObjectId(bytes(64), 0)
PAYLOAD = b"payload!" * 100
MAX_REPLY_BYTES = 64 << 10
"""Bytes that fit into the buffer of a socket, so that no thread has to send them."""


def load(connection: resp.RespConnection) -> None:
    into = memoryview(bytearray(len(PAYLOAD)))
    loaded = objects.load(connection, OBJECT, into)
    # Each piece has its seal. A reply with a valid seal is this row, or a server that computed one.
    assert loaded is None or loaded.length <= len(into)


def store(connection: resp.RespConnection) -> None:
    objects.store(connection, OBJECT, memoryview(PAYLOAD), b"")


def share_marks(connection: resp.RespConnection) -> None:
    members = marks.exchange(connection, "marks", [b"12345678"], 1, 10, marks.MarksQuery(0, 10))
    assert len(members) <= 10
    assert all(len(member) <= 64 for member in members)


OPERATIONS = (
    lambda connection: connection.call("PING"),
    lambda connection: connection.call_all([("EXISTS", "a"), ("EXISTS", "b")]),
    lambda connection: connection.call_for_numbers([("EXISTS", "a"), ("EXISTS", "b")]),
    load,
    store,
    lambda connection: connection.authenticate("user", "secret"),
    share_marks,
)


@contextlib.contextmanager
def replying(reply: bytes):
    """Open a connection to a server that sends these bytes and then closes its side."""
    near, far = socket.socketpair()
    with near, far, mock.patch.object(resp, "open_stream", return_value=Stream(near, 2.0)):
        far.sendall(reply[:MAX_REPLY_BYTES])
        far.shutdown(socket.SHUT_WR)
        yield resp.RespConnection(Endpoint("/fuzz"), Address.parse("unix:///fuzz"), 2.0)


def run(data: bytes) -> None:
    source = BytesInput(data)
    operation, is_asking = source.choice(OPERATIONS), source.flag()
    with replying(source.rest()) as connection:
        connection.asking = is_asking
        operation(connection)


TARGET = Target(run, (OSError, TierError, InvalidObjectError))
