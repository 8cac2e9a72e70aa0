"""Checks a client's offer of GPU memory, and its requests to copy from that memory.

Each function raises CallRefusedError with a sentence that says what to do. Sums use Python's integers, which
don't overflow. The reader process checks the offer again with the sizes that the driver reports.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_client.rpc import service
from lmcache_sidecar.clients.validation import (
    MAX_GROUPS,
    ParsedHello,
    check_length,
    invalid,
    parse_slots,
    require,
)
from lmcache_store.tiers.memory.contracts import Slot

HANDLE_BYTES = 64
MAX_ALLOCATIONS = 4096
MAX_LAYERS = 4096
MAX_PAGES_PER_ROW = 1 << 16
"""Limit of the pieces that a copy of one slot has; 16 blocks of 128 layers are 2,048 pieces."""

_MAX_ALLOCATION_BYTES = 1 << 48
_UUID = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_GPU = re.compile(rf"GPU-{_UUID}|MIG-{_UUID}|MIG-GPU-{_UUID}/[0-9]+/[0-9]+")


class SlotCopy(NamedTuple):
    """One slot to fill, and the blocks to copy into it."""

    group: int
    slot: Slot
    blocks: NDArray[np.uint32]


def check_offer(peer: ParsedHello) -> None:
    """Check the offer of a Hello, as far as possible without opening the memory."""
    offer = peer.hello.transfer
    check_length("refusal", offer.refusal.encode())
    if not offer.gpu_uuid:
        require(not offer.allocations and not offer.groups, "GPU memory is offered without a gpu_uuid")
        return
    require(
        bool(_GPU.fullmatch(offer.gpu_uuid)), f"gpu_uuid {offer.gpu_uuid[:64]!r} names no GPU or MIG device"
    )
    if not offer.allocations:
        require(not offer.groups, "pages are offered without allocations")
        return
    require(peer.is_worker, "only a worker can offer KV: this client attaches as the scheduler")
    _check_allocations(offer)
    num_groups = len(offer.groups)
    require(num_groups <= MAX_GROUPS, f"at most {MAX_GROUPS} groups are allowed, not {num_groups}")
    groups = sorted(pages.group for pages in offer.groups)
    require(
        groups == peer.storing,
        f"pages must be offered once for each of the groups {peer.storing}, not for {groups}",
    )
    for pages in offer.groups:
        _check_pages(pages, offer, peer.chunk_bytes[pages.group])


def parse_copies(request: pb.CopyBlocksRequest, peer: ParsedHello, num_rows: int) -> list[SlotCopy]:
    """Return the copies that a CopyBlocks requests, in its order."""
    require(len(request.groups) <= MAX_GROUPS, f"a call accepts at most {MAX_GROUPS} groups of slots")
    parse_slots(b"".join(copies.slots for copies in request.groups), num_rows)
    offered = {pages.group: pages for pages in peer.hello.transfer.groups}
    requested = []
    for copies in request.groups:
        if (pages := offered.get(copies.group)) is None:
            raise invalid(f"no pages of group {copies.group} were offered")
        slots = parse_slots(copies.slots, num_rows)
        num_blocks = len(slots) * pages.blocks_per_row
        require(
            len(copies.blocks) == num_blocks * service.BLOCK_BYTES,
            f"{len(slots)} slots of group {copies.group} need {num_blocks} blocks of"
            f" {service.BLOCK_BYTES} bytes, not {len(copies.blocks)} bytes",
        )
        blocks = np.frombuffer(copies.blocks, "<u4").reshape(len(slots), pages.blocks_per_row)
        require(
            not blocks.size or int(blocks.max()) < pages.num_blocks,
            f"blocks of group {copies.group} must be below {pages.num_blocks}",
        )
        requested += [SlotCopy(copies.group, slot, ids) for slot, ids in zip(slots, blocks, strict=True)]
    require(bool(requested), "the call names no slot")  # a job without slots would never end
    return requested


def _check_allocations(offer: pb.TransferOffer) -> None:
    number = len(offer.allocations)
    require(number <= MAX_ALLOCATIONS, f"at most {MAX_ALLOCATIONS} allocations are allowed, not {number}")
    handles = [allocation.ipc_handle for allocation in offer.allocations]
    require(all(len(handle) == HANDLE_BYTES for handle in handles), f"an ipc_handle has {HANDLE_BYTES} bytes")
    require(len(set(handles)) == len(handles), "every allocation must be offered once")
    require(
        all(1 <= allocation.num_bytes <= _MAX_ALLOCATION_BYTES for allocation in offer.allocations),
        "num_bytes of an allocation is out of range",
    )


def _check_pages(pages: pb.GroupPages, offer: pb.TransferOffer, chunk_bytes: int) -> None:
    name = f"of group {pages.group}"
    require(1 <= len(pages.layers) <= MAX_LAYERS, f"layers {name} must be 1 to {MAX_LAYERS}")
    require(pages.num_blocks >= 1, f"num_blocks {name} must be positive")
    require(
        pages.blocks_per_row >= 1 and pages.blocks_per_row * len(pages.layers) <= MAX_PAGES_PER_ROW,
        f"a row {name} must have 1 to {MAX_PAGES_PER_ROW} pages, it has {pages.blocks_per_row} blocks of"
        f" {len(pages.layers)} layers",
    )
    row_bytes = pages.blocks_per_row * sum(layer.page_bytes for layer in pages.layers)
    require(
        row_bytes <= chunk_bytes, f"a row {name} has {row_bytes} bytes, its chunk_bytes are {chunk_bytes}"
    )
    for layer in pages.layers:
        require(
            layer.allocation < len(offer.allocations),
            f"a layer {name} lies in an allocation that is not offered",
        )
        require(layer.page_bytes >= 1, f"page_bytes {name} must be positive")
        require(layer.block_stride >= layer.page_bytes, f"pages {name} must not overlap in a layer")
        end = layer.offset + (pages.num_blocks - 1) * layer.block_stride + layer.page_bytes
        num_bytes = offer.allocations[layer.allocation].num_bytes
        require(end <= num_bytes, f"a layer {name} ends at byte {end} of an allocation of {num_bytes}")
