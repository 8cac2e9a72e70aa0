"""A file of an encrypted disk tier gives only bytes that its cipher encrypted for this object and position.

Input: changes of the file, see ``edits``. The other files are: the same object with other content, a longer
one under an older key, another row, another column, another key version, the remote tier's key, and a plain
file. Zeros that pad pieces to whole pages have no meaning, and may change. Pieces are as short as a page, so
that the file has several.
"""

import contextlib
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.disk import file_formats
from lmcache_store.tiers.disk.files import Directory, path_of
from lmcache_store.tiers.encryption.pieces import MAGIC, OVERHEAD_BYTES, Cipher, PiecePlace, parse_preamble
from lmcache_store.tiers.errors import InvalidObjectError, KeyAbsentError
from lmcache_store.tiers.header import HEADER_BYTES
from lmcache_store.tiers.pages import PAGE_BYTES
from tests.fuzz.bytes_input import BytesInput
from tests.fuzz.edits import edited
from tests.fuzz.recorded_cipher import RecordedCipher
from tests.fuzz.target import Target
from tests.harness.tiers.encryption import cipher, keys

OBJECT, OTHER_ROW = ObjectId(bytes(range(64)), 0), ObjectId(bytes(64), 0)
OTHER_COLUMN = ObjectId(OBJECT.row_key, 1)
PIECE_BYTES = PAGE_BYTES - OVERHEAD_BYTES
MARKER_BYTES = HEADER_BYTES + OVERHEAD_BYTES
PAYLOAD, OTHER_PAYLOAD, LONGER_PAYLOAD = (
    random.Random(seed).randbytes(2 * PIECE_BYTES + extra) for seed, extra in enumerate((104, 104, 204))
)


class World(NamedTuple):
    """The opened directory, the path of the object there, and the files from which an input copies."""

    directory: Directory
    cipher: RecordedCipher
    path: Path
    files: list[bytes]


def written(folder: Path, object_id: ObjectId, by: Cipher | None, payload: bytes = PAYLOAD) -> bytes:
    with contextlib.closing(Directory(str(folder), by)) as directory:
        return (folder / directory.write(object_id, memoryview(payload), b"label")).read_bytes()


def foreign(known: Cipher, tier: str, other_tier: str) -> list[tuple[ObjectId, Cipher | None]]:
    """Return the objects that an input copies from, each with its cipher."""
    of_the_tier = [(object_id, known) for object_id in (OBJECT, OTHER_ROW, OTHER_COLUMN)]
    return [*of_the_tier, (OBJECT, cipher(tier, 3)), (OBJECT, cipher(other_tier, 1, 2)), (OBJECT, None)]


@contextlib.contextmanager
def opened() -> Iterator[World]:
    with (
        tempfile.TemporaryDirectory(prefix="lmc-fuzz-") as name,
        mock.patch.object(file_formats, "PIECE_BYTES", PIECE_BYTES),
    ):
        folder, known = Path(name), RecordedCipher("disk")
        known.use(keys(1))
        longer = written(folder, OBJECT, known, LONGER_PAYLOAD)
        known.use(keys(1, 2))
        files = [written(folder, object_id, by) for object_id, by in foreign(known, "disk", "remote")]
        files += [written(folder, OBJECT, known, OTHER_PAYLOAD), longer]
        with contextlib.closing(Directory(name, known)) as directory:
            yield World(directory, known, folder / path_of(directory.stored_id(OBJECT)), files)


def split(content: bytes, total: int) -> list[bytes]:
    """Return the pieces of a file with a payload of this length; none if the file has another length."""
    starts = range(0, total, PIECE_BYTES)
    if len(content) != PAGE_BYTES * (1 + len(starts)):
        return []
    lengths = [min(PIECE_BYTES, total - start) + OVERHEAD_BYTES for start in starts]
    return [content[PAGE_BYTES * n :][:length] for n, length in enumerate(lengths, 1)]


def lacks_key(page: bytes) -> bool:
    """Say whether a page begins like a piece under a version that the tier lacks."""
    return page.startswith(MAGIC) and len(page) >= OVERHEAD_BYTES and parse_preamble(page)[0] not in (1, 2)


def run(data: bytes, world: World) -> None:
    directory, known, path, files = world
    content = edited(BytesInput(data), files[0], files)
    path.write_bytes(content)
    payload = known.genuine(OBJECT, content[:MARKER_BYTES], lambda total: split(content, total))
    into = memoryview(bytearray(1 << 14))
    has_header = len(content) >= PAGE_BYTES and (
        (PiecePlace.of_header(OBJECT), content[:MARKER_BYTES]) in known.contents
    )
    assert directory.is_readable(OBJECT) == has_header
    try:
        loaded = directory.read(OBJECT, into)
    except (InvalidObjectError, KeyAbsentError) as error:
        assert payload is None, "a genuine file was refused"
        pages = [content[start : start + PAGE_BYTES] for start in range(0, len(content), PAGE_BYTES)]
        if isinstance(error, KeyAbsentError):
            assert any(map(lacks_key, pages)), "the tier has all keys of the file"
        else:  # the tier deletes the file
            assert len(content) % PAGE_BYTES or not lacks_key(content), "the file may be valid under a key"
        return
    assert payload is not None, "a changed file was accepted"
    assert loaded is not None
    assert into[: loaded.length] == payload


TARGET = Target(run, opened=opened)
