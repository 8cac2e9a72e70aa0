import os

import hypothesis.strategies as st
import pytest
import xxhash
from hypothesis import given

from lmcache_store.tiers.errors import InvalidObjectError
from lmcache_store.tiers.header import (
    HEADER_BYTES,
    MAX_LABEL_BYTES,
    PART_BYTES,
    Digests,
    Header,
    checksum,
    digests,
    parse,
    slot_checksum,
)


@st.composite
def headers(draw):
    return Header(
        key=draw(st.binary(min_size=64, max_size=64)),
        column=draw(st.integers(0, 2**32 - 1)),
        total_bytes=draw(st.integers(0, 2**64 - 1)),
        checksum=draw(st.binary(min_size=16, max_size=16)),
        label=draw(st.binary(max_size=MAX_LABEL_BYTES)),
    )


@given(headers())
def test_parses_the_packed_header(header):
    packed = header.pack()
    assert len(packed) == HEADER_BYTES == 704
    assert parse(packed) == header


@given(headers(), st.integers(0, HEADER_BYTES * 8 - 1))
def test_refuses_any_flipped_bit(header, bit):
    raw = bytearray(header.pack())
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(InvalidObjectError):
        parse(raw)


def test_refuses_another_version():
    raw = bytearray(Header(bytes(64), 0, 0, bytes(16)).pack())
    raw[8] += 1
    with pytest.raises(InvalidObjectError, match="header"):
        parse(raw)


@pytest.mark.parametrize("fields", [{"key": bytes(63)}, {"label": bytes(513)}, {"checksum": b""}])
def test_refuses_to_pack_invalid_fields(fields):
    good = {"key": bytes(64), "column": 0, "total_bytes": 0, "checksum": bytes(16)}
    with pytest.raises(ValueError, match=r"."):
        Header(**(good | fields)).pack()


@pytest.mark.parametrize("size", [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES])
def test_checksum_of_several_parts_hashes_their_digests(size):
    payload = (bytes(range(251)) * (size // 251 + 1))[:size]
    parts = [payload[start : start + PART_BYTES] for start in range(0, max(1, size), PART_BYTES)]
    part_digests = digests(memoryview(payload))
    assert part_digests == b"".join(xxhash.xxh3_128(part).digest() for part in parts)
    assert checksum(payload) == (part_digests if len(parts) == 1 else xxhash.xxh3_128(part_digests).digest())


@given(st.lists(st.integers(0, PART_BYTES + 2), max_size=5))
def test_digests_do_not_depend_on_the_sizes_of_updates(sizes):
    payload = memoryview(os.urandom(64) * (sum(sizes) // 64 + 1))[: sum(sizes)]
    incremental, start = Digests(), 0
    for size in sizes:
        incremental.update(payload[start : start + size])
        start += size
    assert incremental.digests() == digests(payload)


def test_slot_checksum_differs_for_each_payload_and_name():
    sealed = [(b"k" * 64, 0, 5, b"d" * 16), (b"j" * 64, 0, 5, b"d" * 16), (b"k" * 64, 1, 5, b"d" * 16)]
    sealed += [(b"k" * 64, 0, 4, b"d" * 16), (b"k" * 64, 0, 5, b"e" * 16), (b"k" * 64, 0, 5, b"d" * 32)]
    assert len({slot_checksum(*fields) for fields in sealed}) == len(sealed)
