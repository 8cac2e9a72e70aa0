"""A changed row of an encrypted remote tier is refused, and an unchanged one has the bytes of its object.

Input: changes of marker and piece, see ``edits``. The other values are those of another row, of another
column, of another key version and of the disk tier's key, and a plain row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lmcache.tiers.base import ObjectId
from lmcache.tiers.encryption.aes import AesGcm
from lmcache.tiers.encryption.pieces import Place
from lmcache.tiers.errors import InvalidObjectError, KeyAbsentError, TierError
from lmcache.tiers.header import NO_CHECKSUM, Header
from lmcache.tiers.remote import objects
from lmcache.tiers.remote.value_formats import PLAIN, EncryptedValues, ValueFormat
from tests.fuzz.bytes_input import BytesInput
from tests.fuzz.edits import edited
from tests.fuzz.target import Target
from tests.fuzz.targets.encrypted_file import OBJECT, OTHER_COLUMN, OTHER_ROW, PAYLOAD
from tests.fuzz.targets.remote_object import bulk
from tests.fuzz.targets.resp_replies import replying
from tests.harness.encryption import cipher

_opened: list[tuple[EncryptedValues, int, list[bytes]]] = []


def values_of(object_id: ObjectId, form: ValueFormat) -> bytes:
    """The marker of a row, and then its only piece."""
    header = Header(object_id.row_key, object_id.column, len(PAYLOAD), NO_CHECKSUM, b"label")
    marker = bytes(form.pack_marker(object_id, header))
    piece = b"".join(map(bytes, form.pack_piece(Place(object_id, len(PAYLOAD), 0), memoryview(PAYLOAD))))
    return marker + piece


@contextlib.contextmanager
def opened() -> Iterator[None]:
    def form_of(by: AesGcm) -> EncryptedValues:
        return EncryptedValues(by)

    form = form_of(cipher("remote", 1, 2))
    foreign: list[tuple[ObjectId, ValueFormat]] = [
        (OBJECT, form), (OTHER_ROW, form), (OTHER_COLUMN, form), (OBJECT, form_of(cipher("remote", 3))),
        (OBJECT, form_of(cipher("disk", 1, 2))), (OBJECT, PLAIN),
    ]  # fmt: skip
    _opened.append((form, form.marker_bytes, [values_of(*other) for other in foreign]))
    yield
    _opened.pop()


def run(data: bytes) -> None:
    form, marker_bytes, values = _opened[-1]
    content = edited(BytesInput(data), values[0], values)
    reply = b"*2\r\n" + bulk(content[:marker_bytes]) + bulk(content[marker_bytes:])
    into = memoryview(bytearray(1 << 14))
    try:
        with replying(reply) as connection:
            loaded = objects.load(connection, OBJECT, into, form=form)
    except (InvalidObjectError, KeyAbsentError, TierError, OSError):
        assert content != values[0], "the row is valid"
        return
    assert content == values[0], "a changed row was accepted"
    assert loaded is not None
    assert into[: loaded.length] == PAYLOAD


TARGET = Target(run, opened=opened)
