"""Addresses of blocks, compared with copies byte by byte; addresses outside are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_sidecar.copiers import messages
from lmcache_sidecar.copiers.messages import Copies, Format, MessageError, MessageKind
from lmcache_sidecar.copiers.pages import Column, Opened, Pages

BASES = (1 << 44, 1 << 45)
COLUMN = Column(offset=8192, num_bytes=10 * 4096, slot_bytes=4096, address=1 << 46)


def words(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint64)


def pages(*layers: tuple[int, int, int, int]) -> pb.GroupPages:
    names = ("allocation", "offset", "page_bytes", "block_stride")
    described = [pb.LayerPages(**dict(zip(names, layer, strict=True))) for layer in layers]
    return pb.GroupPages(num_blocks=5, blocks_per_row=2, layers=described)


def opened(*sizes: int) -> list[Opened]:
    return [Opened(base, size) for base, size in zip(BASES, sizes, strict=False)]


@given(
    layers=st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 300), st.integers(1, 64), st.integers(64, 99)),
        min_size=1,
        max_size=4,
    ),
    rows=st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=2), min_size=1, max_size=5),
)
def test_each_byte_of_a_slot_is_copied_from_its_page(layers, rows):
    group_pages = Pages(pages(*layers), opened(1000, 1000), COLUMN)
    slots = np.arange(len(rows), dtype=np.uint64) * 4096 + 8192
    expected = {}
    for slot, blocks in zip(slots.tolist(), rows, strict=True):
        address = COLUMN.address + slot - COLUMN.offset
        for block in blocks:
            for allocation, offset, page_bytes, stride in layers:
                for byte in range(page_bytes):
                    expected[address + byte] = BASES[allocation] + offset + block * stride + byte
                address += page_bytes
    copied = {}
    for to, from_, size in zip(*group_pages.pieces(slots, np.array(rows, np.uint32)), strict=True):
        copied |= {int(to) + byte: int(from_) + byte for byte in range(int(size))}
    assert copied == expected


def test_refuses_pages_beyond_their_allocation_or_column():
    Pages(pages((0, 0, 64, 64)), opened(320), COLUMN)
    with pytest.raises(ValueError, match="ends at byte 320 of an allocation of 319"):
        Pages(pages((0, 0, 64, 64)), opened(319), COLUMN)
    with pytest.raises(ValueError, match="larger than its column"):
        Pages(pages((0, 0, 1 << 20, 1 << 20)), opened(1 << 30), COLUMN)


@pytest.mark.parametrize(
    ("offsets", "blocks"),
    [
        (words(8192), [[0, 5]]),
        (words(8192), [[0, (1 << 32) - 1]]),
        (words(8192), [[0, 1, 2]]),
        (words(8192, 12288), [[0, 1]]),
        (words(4096), [[0, 1]]),
        (words(0), [[0, 1]]),
        (words(8192 + 10 * 4096), [[0, 1]]),
        (words(8193), [[0, 1]]),
        (words((1 << 64) - 4096), [[0, 1]]),
    ],
)
def test_refuses_blocks_and_offsets_outside(offsets, blocks):
    group_pages = Pages(pages((0, 0, 64, 64)), opened(1000), COLUMN)
    with pytest.raises(ValueError, match=r"does not exist in the KV|outside the client's column"):
        group_pages.pieces(offsets, np.array(blocks, np.uint32))


def test_messages_survive_a_round_trip():
    sent = [
        Copies(7, 1, words(4096, 8192), np.array([[1, 2], [3, 4]], np.uint32)),
        Copies(1 << 63, 0, words(1), np.array([[9]], np.uint32)),
    ]
    for copies, parsed in zip(sent, messages.parse_copies(messages.pack_copies(sent)), strict=True):
        assert parsed[:2] == copies[:2]
        assert parsed.offsets.tolist() == copies.offsets.tolist()
        assert parsed.blocks.tolist() == copies.blocks.tolist()
    assert messages.parse_start(messages.pack_start("GPU-1", Format(1, 2, 3))) == ("GPU-1", Format(1, 2, 3))
    assert messages.parse_open(messages.pack_open(5, b"offer")) == (5, b"offer")
    message = messages.pack(MessageKind.OPENED, 9, messages.pack_reason("é" * 9000))
    assert messages.parse_head(message[: messages.HEAD.size]) == (MessageKind.OPENED, 2048, 9)


@given(st.binary(max_size=80))
def test_refuses_arbitrary_bytes(noise):
    try:
        for copies in messages.parse_copies(noise):
            assert copies.blocks.shape[0] == len(copies.offsets)
    except MessageError:
        pass
    head = noise.ljust(messages.HEAD.size, b"\0")[: messages.HEAD.size]
    try:
        _, num_bytes, _ = messages.parse_head(head)
        assert num_bytes <= messages.MAX_BODY_BYTES
    except MessageError:
        pass
