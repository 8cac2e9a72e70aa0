"""A row of an encrypted remote tier gives only bytes that its cipher encrypted for this object and position.

Input: a flag, and changes of marker and pieces, see ``edits``. With the flag, the values have the lengths of
the longer row. The other values are: another row, another column, another
key version, the disk tier's key, a plain row, the same object with other content, and a longer one under an
older key.
"""

import contextlib
from typing import NamedTuple

from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.encryption.pieces import OVERHEAD_BYTES, PiecePlace
from lmcache_store.tiers.errors import InvalidObjectError, KeyAbsentError, TierError
from lmcache_store.tiers.header import NO_CHECKSUM, Header
from lmcache_store.tiers.remote import objects
from lmcache_store.tiers.remote.objects import piece_sizes
from lmcache_store.tiers.remote.value_formats import PLAIN, EncryptedValues, ValueFormat
from tests.fuzz.bytes_input import BytesInput
from tests.fuzz.edits import edited
from tests.fuzz.recorded_cipher import RecordedCipher
from tests.fuzz.target import Target
from tests.fuzz.targets.encrypted_file import LONGER_PAYLOAD, OBJECT, OTHER_PAYLOAD, PAYLOAD, foreign
from tests.fuzz.targets.remote_object import bulk
from tests.fuzz.targets.resp_replies import replying
from tests.harness.tiers.encryption import keys


class World(NamedTuple):
    """The format of the tier, its cipher, and the values from which an input copies."""

    form: EncryptedValues
    cipher: RecordedCipher
    values: list[bytes]


def values_of(object_id: ObjectId, form: ValueFormat, payload: bytes = PAYLOAD) -> bytes:
    """The marker of a row, and then its pieces."""
    total, start = len(payload), 0
    header = Header(object_id.row_key, object_id.column, total, NO_CHECKSUM, b"label")
    values = bytes(form.pack_marker(object_id, header))
    for size in piece_sizes(total):
        piece = memoryview(payload)[start : start + size]
        values += b"".join(map(bytes, form.pack_piece(PiecePlace(object_id, total, start), piece)))
        start += size
    return values


def opened() -> contextlib.nullcontext[World]:
    known = RecordedCipher("remote")
    form = EncryptedValues(known)
    known.use(keys(1))
    longer = values_of(OBJECT, form, LONGER_PAYLOAD)
    known.use(keys(1, 2))
    values = [
        values_of(object_id, EncryptedValues(by) if by else PLAIN)
        for object_id, by in foreign(known, "remote", "disk")
    ]
    world = World(form, known, [*values, values_of(OBJECT, form, OTHER_PAYLOAD), longer])
    return contextlib.nullcontext(world)


def split(content: bytes, lengths: list[int]) -> list[bytes]:
    """Return parts of these lengths, and the rest as the last part."""
    parts = []
    for length in lengths:
        parts.append(content[:length])
        content = content[length:]
    return [*parts, content]


def run(data: bytes, world: World) -> None:
    form, known, values = world
    source = BytesInput(data)
    sizes = piece_sizes(len(LONGER_PAYLOAD if source.flag() else PAYLOAD))
    content = edited(source, values[0], values)
    marker, *pieces = split(content, [form.marker_bytes, *(size + OVERHEAD_BYTES for size in sizes[:-1])])
    payload = known.genuine(OBJECT, marker, lambda total: pieces[: len(piece_sizes(total))])
    into = memoryview(bytearray(1 << 14))
    try:
        with replying(b"*2\r\n" + b"".join(map(bulk, [marker, *pieces]))) as connection:
            loaded = objects.load(connection, OBJECT, into, form=form)
    except (InvalidObjectError, KeyAbsentError, TierError, OSError):
        assert payload is None, "a genuine row was refused"
        return
    assert payload is not None, "a changed row was accepted"
    assert loaded is not None
    assert into[: loaded.length] == payload


TARGET = Target(run, opened=opened)
