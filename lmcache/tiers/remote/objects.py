"""Objects in Redis: their names, and how one is read and written over a connection.

One column of a row is stored in parts of at most 4 MiB (Redis handles one value at a time: larger ones would
make all its other clients wait), ``<prefix>:<namespace>:{<key>:<column>}:<part>``,
each with its own header. All writers of one name write the same bytes, so any valid set of parts makes the
object, whoever wrote them. Part 0 is written last: it is the presence marker, and says how many parts there
are.

What is read is compared with what was asked for: version, name, column, part, lengths, checksum.
"""

from __future__ import annotations

from lmcache.tiers.base import Loaded, ObjectId, split_row_key
from lmcache.tiers.errors import HeaderError, InvalidObjectError, ServerError
from lmcache.tiers.header import HEADER_BYTES, PART_BYTES, Header, checksum, digest_of, digests, parse
from lmcache.tiers.remote.resp import Connection
from lmcache.units import ceil_div


def redis_name(prefix: str, object_id: ObjectId, part: int) -> str:
    """Name one part; all parts of an object share a hash tag."""
    namespace = split_row_key(object_id.row_key)[0]
    return f"{prefix}:{namespace.hex()}:{{{hash_tag(object_id)}}}:{part}"


def _name(connection: Connection, object_id: ObjectId, part: int) -> str:
    return redis_name(connection.prefix, object_id, part)


def hash_tag(object_id: ObjectId) -> str:
    """What of a name decides in which slot of a cluster it is."""
    return f"{split_row_key(object_id.row_key)[1].hex()}:{object_id.column}"


def num_parts(total_bytes: int) -> int:
    """Parts of a payload; an empty one has one, too."""
    return max(1, ceil_div(total_bytes, PART_BYTES))


def load(
    connection: Connection, object_id: ObjectId, into: memoryview, length: int | None = None
) -> Loaded | None:
    """Return the payload; None when there is no such object. Raises InvalidObjectError, also when it has not
    ``length`` bytes.

    The next part is asked for before the one that came is compared with its checksum: the server copies the
    one meanwhile. To ask for it still earlier is slower, two replies are too much for the caches.
    """
    connection.ask([("GET", _name(connection, object_id, 0))])
    header = _read_part(connection, object_id, 0, into)
    if header is None:
        return None
    total = header.total_bytes
    if total > len(into) or length not in (None, total):
        raise InvalidObjectError("length")
    found = [header.checksum]
    for part in range(1, header.num_parts):
        connection.ask([("GET", _name(connection, object_id, part))])
        _compare(header, into)
        header = _read_part(connection, object_id, part, into)
        if header is None:
            raise InvalidObjectError("part")
        if header.total_bytes != total:
            raise InvalidObjectError("length")
        found.append(header.checksum)
    _compare(header, into)
    return Loaded(total, b"".join(found))


def _compare(header: Header, into: memoryview) -> None:
    start = header.part * PART_BYTES
    if checksum(into[start : start + header.payload_bytes]) != header.checksum:
        raise InvalidObjectError("checksum")


def _read_part(connection: Connection, object_id: ObjectId, part: int, into: memoryview) -> Header | None:
    """Read one part into its place. Is it what was asked for, but for the checksum? None: there is none."""
    try:
        num_bytes = connection.read_bulk_length()
    except ServerError as error:
        if error.code != "WRONGTYPE":
            raise
        raise InvalidObjectError("type") from None
    if num_bytes is None:
        return None
    place = into[part * PART_BYTES : (part + 1) * PART_BYTES]
    length = num_bytes - HEADER_BYTES
    if not 0 <= length <= len(place):
        raise InvalidObjectError("length")
    head = memoryview(bytearray(HEADER_BYTES))
    connection.read_bulk(head, place[:length])
    connection.end_bulk()
    try:
        header = parse(head)
    except HeaderError:
        raise InvalidObjectError("header") from None
    if (header.key, header.column, header.part) != (object_id.row_key, object_id.column, part):
        raise InvalidObjectError("name")
    total = header.total_bytes
    expected = min(PART_BYTES, total - part * PART_BYTES)
    if header.num_parts != num_parts(total) or not length == header.payload_bytes == expected:
        raise InvalidObjectError("length")
    return header


def store(
    connection: Connection,
    object_id: ObjectId,
    payload: memoryview,
    label: bytes,
    part_digests: bytes = b"",
    is_rewrite: bool = False,
) -> bool:
    """Return False when all of it was there already, and was touched. Raises ServerError when it is refused.

    The next part is made and sent while the server still takes in the one before it; the marker waits for
    all.
    """
    total = num_parts(len(payload))
    if not is_rewrite:
        touched = connection.call_all(
            [("TOUCH", _name(connection, object_id, part)) for part in range(total)]
        )
        for reply in touched:
            if isinstance(reply, ServerError):
                raise reply
        if touched == [1] * total:
            return False
    part_digests = part_digests or digests(payload)
    for part in range(1, total):
        _send_part(connection, object_id, part, payload, label, part_digests)
        if part > 1:
            connection.read_reply()
    if total > 1:
        connection.read_reply()
    _send_part(connection, object_id, 0, payload, label, part_digests)
    connection.read_reply()
    return True


def _send_part(
    connection: Connection,
    object_id: ObjectId,
    part: int,
    payload: memoryview,
    label: bytes,
    part_digests: bytes,
) -> None:
    content = payload[part * PART_BYTES : (part + 1) * PART_BYTES]
    header = Header(
        object_id.row_key,
        object_id.column,
        part,
        num_parts(len(payload)),
        len(content),
        len(payload),
        digest_of(part_digests, part),
        label,
    )
    connection.set(_name(connection, object_id, part), [header.pack(), content])
