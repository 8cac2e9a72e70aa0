"""A file of the disk tier with any bytes is refused, or has the bytes that its header's checksum names.

Input: a header (two bytes of length in front; its checksum is corrected), a flag, and the payload. With the
flag, the header is that of the payload, and the rest of the header's bytes is ignored.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.disk.files import Directory, path_of
from lmcache_store.tiers.errors import InvalidObjectError
from lmcache_store.tiers.header import Header, checksum, parse
from lmcache_store.tiers.pages import PAGE_BYTES
from tests.fuzz.bytes_input import BytesInput
from tests.fuzz.target import Target
from tests.fuzz.targets.header import sealed

OBJECT = ObjectId(bytes(range(64)), 0)
MAX_PAYLOAD = 4 * PAGE_BYTES


@contextlib.contextmanager
def opened() -> Iterator[Directory]:
    with (
        tempfile.TemporaryDirectory(prefix="lmc-fuzz-") as folder,
        contextlib.closing(Directory(folder)) as directory,
    ):
        (Path(folder) / path_of(OBJECT)).parent.mkdir(parents=True)
        yield directory


def run(data: bytes, directory: Directory) -> None:
    source = BytesInput(data)
    raw, is_valid = source.sized(), source.flag()
    payload = source.rest()
    if is_valid:
        raw = Header(OBJECT.row_key, 0, len(payload), checksum(payload)).pack()
        payload = payload.ljust(-(-len(payload) // PAGE_BYTES) * PAGE_BYTES, b"\0")
    header = sealed(raw)
    (Path(directory.path) / path_of(OBJECT)).write_bytes(header.ljust(PAGE_BYTES, b"\0") + payload)
    into = memoryview(bytearray(MAX_PAYLOAD))
    loaded = directory.read(OBJECT, into)
    assert loaded is not None
    assert into[: loaded.length] == payload[: loaded.length]
    assert checksum(into[: loaded.length]) == parse(header).checksum
    assert not any(payload[loaded.length :]) or not is_valid


TARGET = Target(run, (InvalidObjectError,), opened=opened)
