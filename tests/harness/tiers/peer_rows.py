"""Rows in the memory of a test, a server of them, and a tier that reads them."""

import contextlib
import socket

import pytest

from lmcache_sidecar.peer_server.server import PeerServer
from lmcache_store.tiers.base import KEY_BYTES, ObjectId
from lmcache_store.tiers.peers.tier import PeersTier
from lmcache_store.tiers.remote import objects
from lmcache_store.tiers.remote.address import Endpoint

PREFIX = "lmc1"
NAMESPACE = b"n" * KEY_BYTES
PATIENT = 60.0


def key(number):
    return NAMESPACE + number.to_bytes(KEY_BYTES, "big")


class Row:
    is_lost = False

    def __init__(self, rows, number):
        self._rows, self._key = rows, number
        self.columns = [memoryview(payload) for payload in rows.payloads[number]]

    def release(self):
        self._rows.pinned.remove(self._key)


class Rows:
    """Rows in memory of this process."""

    def __init__(self):
        self.payloads, self.pinned, self.taken, self.num_pins = {}, [], [], 0

    def add(self, number, *payloads):
        self.payloads[key(number)] = payloads
        return [ObjectId(key(number), column) for column in range(len(payloads))]

    def find_each(self, ids):
        return [each.column < len(self.payloads.get(each.row_key, ())) for each in ids]

    def pin(self, row_key):
        if row_key not in self.payloads:
            return None
        self.pinned.append(row_key)
        self.num_pins += 1
        return Row(self, row_key)

    def take_over(self, row_key, length, tenant, peer):
        self.taken.append((row_key, length, tenant, peer))
        return True


@contextlib.contextmanager
def serving(rows, host="127.0.0.1", **options):
    server = PeerServer(rows, PREFIX, **options)
    port = server.start("" if host == "::1" else host, 0)  # "": all addresses
    try:
        yield server, Endpoint(host, port)
    finally:
        server.close()


@contextlib.contextmanager
def reading(*peers, password="", **options):
    patient = {"timeout_seconds": PATIENT, "ask_seconds": PATIENT}
    tier = PeersTier(peers, prefix=PREFIX, password=lambda: password, **patient | options)
    with contextlib.closing(tier):
        yield tier


@pytest.fixture
def rows():
    return Rows()


def load(tier, object_id, length):
    into = memoryview(bytearray(length))
    loaded = tier.load(object_id, into, length)
    return None if loaded is None else bytes(into)


def command(*words):
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def ask_for(piece):
    """The command that reads a piece of row 1."""
    return command(b"HGET", objects.redis_name(PREFIX, key(1)).encode(), b"0:%d" % piece)


def connect(peer):
    connection = socket.create_connection(peer, timeout=PATIENT)
    connection.settimeout(PATIENT)
    return connection


def is_closed(connection):
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass
    return True
