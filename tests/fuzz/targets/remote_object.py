"""A row in Redis with any marker and pieces is refused, or has exactly the bytes that its seals cover.

Input: for the marker a flag and its bytes, then for each piece a flag and its bytes (two bytes of length in
front of each string). With the flag, the marker's checksum is corrected, or the seal of the piece.
"""

from lmcache_store.tiers.errors import InvalidObjectError, TierError
from lmcache_store.tiers.header import parse
from lmcache_store.tiers.remote import objects
from lmcache_store.tiers.remote.value_formats import seal_of
from tests.fuzz.bytes_input import BytesInput
from tests.fuzz.target import Target
from tests.fuzz.targets.header import sealed
from tests.fuzz.targets.resp_replies import OBJECT, replying

MAX_PAYLOAD = 16 << 10


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(value), value)


def total_bytes(marker: bytes) -> int:
    try:
        return parse(marker).total_bytes
    except InvalidObjectError:
        return 0


def run(data: bytes) -> None:
    source = BytesInput(data)
    is_sealed, marker = source.flag(), source.sized()
    marker = sealed(marker) if is_sealed else marker
    total, start, payload, reply = total_bytes(marker), 0, b"", b"*2\r\n" + bulk(marker)
    while source.has_more and len(payload) <= MAX_PAYLOAD:
        is_sealed, piece = source.flag(), source.sized()
        payload += piece
        seal = source.take(16) if not is_sealed else seal_of(OBJECT, total, start, memoryview(piece))
        start += len(piece)
        reply += bulk(piece + seal)
    into = memoryview(bytearray(MAX_PAYLOAD))
    with replying(reply) as connection:
        loaded = objects.load(connection, OBJECT, into)
    assert loaded is not None
    assert into[: loaded.length] == payload[: loaded.length]
    assert loaded.length == total


TARGET = Target(run, (OSError, TierError, InvalidObjectError))
