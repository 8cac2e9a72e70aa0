"""A file of an encrypted disk tier is refused if its pieces changed, or else has the bytes of its object.

Input: changes of the file, see ``edits``. The other files are those of another row, of another column, of
another key version and of the remote tier's key, and a plain file. Zeros that pad pieces to whole pages have
no meaning, and may change.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lmcache.tiers.base import ObjectId
from lmcache.tiers.disk.files import Directory, path_of
from lmcache.tiers.encryption.aes import AesGcm
from lmcache.tiers.encryption.pieces import OVERHEAD_BYTES
from lmcache.tiers.errors import InvalidObjectError, KeyAbsentError
from lmcache.tiers.header import HEADER_BYTES
from lmcache.tiers.pages import PAGE_BYTES
from tests.fuzz.bytes_input import BytesInput
from tests.fuzz.edits import edited
from tests.fuzz.target import Target
from tests.harness.encryption import cipher

OBJECT, OTHER_ROW = ObjectId(bytes(range(64)), 0), ObjectId(bytes(64), 0)
OTHER_COLUMN = ObjectId(OBJECT.row_key, 1)
PAYLOAD = b"payload!" * 13
_opened: list[tuple[Directory, Path, list[bytes]]] = []


def written(folder: Path, object_id: ObjectId, by: AesGcm | None) -> bytes:
    directory = Directory(str(folder), by)
    try:
        return (folder / directory.write(object_id, memoryview(PAYLOAD), b"label")).read_bytes()
    finally:
        directory.close()


@contextlib.contextmanager
def opened() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="lmc-fuzz-") as name, contextlib.ExitStack() as stack:
        folder, known = Path(name), cipher("disk", 1, 2)
        foreign = [
            (OBJECT, known), (OTHER_ROW, known), (OTHER_COLUMN, known), (OBJECT, cipher("disk", 3)),
            (OBJECT, cipher("remote", 1, 2)), (OBJECT, None),
        ]  # fmt: skip
        files = [written(folder, object_id, by) for object_id, by in foreign]
        directory = Directory(name, known)
        stack.callback(lambda: _opened.pop()[0].close())
        _opened.append((directory, folder / path_of(directory.stored_id(OBJECT)), files))
        yield


def pieces(content: bytes) -> tuple[bytes, bytes, int]:
    """Return the encrypted header, the encrypted piece, and the length of a file."""
    end = PAGE_BYTES + len(PAYLOAD) + OVERHEAD_BYTES
    return content[: HEADER_BYTES + OVERHEAD_BYTES], content[PAGE_BYTES:end], len(content)


def run(data: bytes) -> None:
    directory, path, files = _opened[-1]
    content = edited(BytesInput(data), files[0], files)
    path.write_bytes(content)
    into = memoryview(bytearray(1 << 14))
    try:
        loaded = directory.read(OBJECT, into)
    except (InvalidObjectError, KeyAbsentError):
        assert content != files[0], "the file is valid"
        return
    assert pieces(content) == pieces(files[0]), "a changed file was accepted"
    assert loaded is not None
    assert into[: loaded.length] == PAYLOAD


TARGET = Target(run, opened=opened)
