from __future__ import annotations

import contextlib
import os

import hypothesis.strategies as st
import pytest
import xxhash
from hypothesis import given

from lmcache.tiers.errors import HeaderError
from lmcache.tiers.header import (
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
def test_round_trip(header):
    packed = header.pack()
    assert len(packed) == HEADER_BYTES == 704
    assert parse(packed) == header


@given(st.binary(max_size=HEADER_BYTES + 8) | st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_other_bytes_are_a_bad_header(raw):
    with pytest.raises(HeaderError):
        parse(raw)


@given(headers(), st.integers(0, HEADER_BYTES * 8 - 1))
def test_no_bit_may_flip(header, bit):
    raw = bytearray(header.pack())
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(HeaderError):
        parse(raw)


@given(headers(), st.integers(0, HEADER_BYTES - 9), st.integers(1, 255))
def test_a_lie_with_a_right_checksum_is_refused_or_read_exactly(header, position, change):
    raw = bytearray(header.pack())
    raw[position] ^= change
    raw[-8:] = xxhash.xxh3_64_intdigest(bytes(raw[:-8])).to_bytes(8, "little")
    with contextlib.suppress(HeaderError):
        assert parse(raw).pack() == raw


def test_another_version_says_so():
    raw = bytearray(Header(bytes(64), 0, 0, bytes(16)).pack())
    raw[8] += 1
    with pytest.raises(HeaderError, match="version 2"):
        parse(raw)


@pytest.mark.parametrize(
    "fields",
    [
        {"key": bytes(63)},
        {"label": bytes(513)},
        {"checksum": b""},
    ],
)
def test_what_could_not_be_read_is_not_written(fields):
    good = {"key": bytes(64), "column": 0, "total_bytes": 0, "checksum": bytes(16)}
    with pytest.raises(ValueError, match=r"."):
        Header(**(good | fields)).pack()


@pytest.mark.parametrize("size", [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES])
def test_the_checksum_of_several_parts_is_that_of_their_digests(size):
    payload = (bytes(range(251)) * (size // 251 + 1))[:size]
    parts = [payload[start : start + PART_BYTES] for start in range(0, max(1, size), PART_BYTES)]
    found = digests(memoryview(payload))
    assert found == b"".join(xxhash.xxh3_128(part).digest() for part in parts)
    assert checksum(payload) == (found if len(parts) == 1 else xxhash.xxh3_128(found).digest())


@given(st.lists(st.integers(0, PART_BYTES + 2), max_size=5))
def test_digests_do_not_depend_on_how_a_payload_arrives(sizes):
    payload = memoryview(os.urandom(64) * (sum(sizes) // 64 + 1))[: sum(sizes)]
    arriving, start = Digests(), 0
    for size in sizes:
        arriving.update(payload[start : start + size])
        start += size
    assert arriving.digests() == digests(payload)


def test_a_seal_fits_one_payload_under_one_name():
    sealed = [(b"k" * 64, 0, 5, b"d" * 16), (b"j" * 64, 0, 5, b"d" * 16), (b"k" * 64, 1, 5, b"d" * 16)]
    sealed += [(b"k" * 64, 0, 4, b"d" * 16), (b"k" * 64, 0, 5, b"e" * 16), (b"k" * 64, 0, 5, b"d" * 32)]
    assert len({slot_checksum(*fields) for fields in sealed}) == len(sealed)
