"""Any bytes are refused as a header, or are exactly what ``pack`` returns for the parsed header.

Input: a flag, and the header. With the flag, the header's checksum is corrected, so that the fuzzer reaches
the checks after it.
"""

import xxhash

from lmcache_store.tiers.errors import InvalidObjectError
from lmcache_store.tiers.header import HEADER_BYTES, parse
from tests.fuzz.target import Target

_CHECKSUM_BYTES = 8


def sealed(raw: bytes) -> bytes:
    """Return a header with these fields and the right checksum."""
    fields = raw[: HEADER_BYTES - _CHECKSUM_BYTES].ljust(HEADER_BYTES - _CHECKSUM_BYTES, b"\0")
    return fields + xxhash.xxh3_64_intdigest(fields).to_bytes(_CHECKSUM_BYTES, "little")


def run(data: bytes) -> None:
    raw = sealed(data[1:]) if data[:1] == b"\1" else data[1:]
    assert parse(raw).pack() == raw


TARGET = Target(run, (InvalidObjectError,), max_bytes=1024)
