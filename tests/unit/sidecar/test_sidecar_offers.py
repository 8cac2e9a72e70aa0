"""Validation of clients' offers of GPU memory, before the sidecar stores anything."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_client.rpc import service
from lmcache_client.rpc.attachment import hello_message
from lmcache_client.rpc.hello import Allocation, ClientHello, GroupPages, LayerPages, Role, TransferOffer
from lmcache_sidecar.clients import offers
from lmcache_sidecar.clients.validation import CallRefusedError, parse_hello
from lmcache_store.kv_groups import KVGroup
from lmcache_store.tiers.memory.contracts import Slot

UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"
HANDLE = b"h" * 64
PAGES = LayerPages(allocation=0, offset=4096, page_bytes=1024, block_stride=2048)
GROUP = GroupPages(0, num_blocks=10, blocks_per_row=2, layers=(PAGES, replace(PAGES, offset=5120)))
END = 5120 + 9 * 2048 + 1024


def offer(**fields: Any) -> TransferOffer:
    defaults = {"gpu_uuid": UUID, "allocations": (Allocation(HANDLE, END),), "groups": (GROUP,)}
    return TransferOffer(**(defaults | fields))


def layers(**fields: Any) -> tuple[GroupPages, ...]:
    return (replace(GROUP, layers=(replace(PAGES, **fields),)),)


def peer_of(transfer: TransferOffer, role: Role = Role.WORKER):
    hello = ClientHello(role, b"e" * 16, b"n" * 32, 256, (KVGroup(0, 16, 4096),), transfer=transfer)
    return parse_hello(hello_message(hello, b"u" * 16))


@pytest.mark.parametrize(
    "transfer",
    [
        TransferOffer(),
        offer(),
        offer(gpu_uuid=UUID.replace("GPU", "MIG")),
        offer(gpu_uuid=f"MIG-{UUID}/3/0"),
        TransferOffer(gpu_uuid=UUID, refusal="its memory is of the VMM kind"),
    ],
)
def test_valid_offer_is_accepted(transfer):
    offers.check_offer(peer_of(transfer))


@pytest.mark.parametrize(
    ("transfer", "sentence"),
    [
        (offer(gpu_uuid=""), "without a gpu_uuid"),
        (offer(gpu_uuid="all"), "'all' names no GPU"),
        (offer(gpu_uuid=UUID + ",GPU-"), "names no GPU or MIG"),
        (offer(gpu_uuid=UUID + "\n"), "names no GPU or MIG"),
        (offer(allocations=()), "pages are offered without allocations"),
        (offer(refusal="r" * 513), "refusal has 513 bytes"),
        (offer(allocations=(Allocation(b"h" * 63, END),)), "an ipc_handle has 64 bytes"),
        (offer(allocations=(Allocation(HANDLE, END),) * 2), "every allocation must be offered once"),
        (offer(allocations=(Allocation(HANDLE, 0),)), "num_bytes of an allocation is out of range"),
        (offer(allocations=(Allocation(HANDLE, (1 << 64) - 1),)),
         "num_bytes of an allocation is out of range"),
        (offer(allocations=(Allocation(HANDLE, END),) * 4097), "at most 4096 allocations"),
        (offer(allocations=(Allocation(HANDLE, END - 1),)),
         f"ends at byte {END} of an allocation of {END - 1}"),
        (offer(groups=()), r"once for each of the groups \[0\], not"),
        (offer(groups=(GROUP, GROUP)), r"once for each of the groups \[0\], not"),
        (offer(groups=(replace(GROUP, group=1),)), r"once for each of the groups \[0\], not"),
        (offer(groups=(GROUP,) * 65), "at most 64 groups"),
        (offer(groups=(replace(GROUP, num_blocks=0),)), "num_blocks of group 0 must be positive"),
        (offer(groups=(replace(GROUP, num_blocks=11),)), "ends at byte"),
        (offer(groups=(replace(GROUP, num_blocks=(1 << 32) - 1),)), "ends at byte"),
        (offer(groups=(replace(GROUP, blocks_per_row=0),)), "a row of group 0 must have 1 to"),
        (offer(groups=(replace(GROUP, blocks_per_row=3),)),
         "a row of group 0 has 6144 bytes, its chunk_bytes"),
        (offer(groups=(replace(GROUP, blocks_per_row=(1 << 32) - 1),)), "a row of group 0 must have 1 to"),
        (offer(groups=(replace(GROUP, layers=()),)), "layers of group 0 must be 1 to"),
        (offer(groups=(replace(GROUP, layers=(PAGES,) * 4097),)), "layers of group 0 must be 1 to"),
        (offer(groups=layers(allocation=1)), "in an allocation that is not offered"),
        (offer(groups=layers(page_bytes=0)), "page_bytes of group 0 must be positive"),
        (offer(groups=layers(block_stride=1023)), "must not overlap"),
        (offer(groups=layers(offset=(1 << 64) - 4096)), "ends at byte 184467"),
        (offer(groups=layers(block_stride=(1 << 64) - 1)), "ends at byte 166020696"),
        (offer(groups=layers(page_bytes=(1 << 64) - 1, block_stride=(1 << 64) - 1)), "its chunk_bytes"),
    ],
)  # fmt: skip
def test_invalid_offer_is_refused_with_a_reason(transfer, sentence):
    with pytest.raises(CallRefusedError, match=sentence):
        offers.check_offer(peer_of(transfer))


def test_offer_of_a_scheduler_is_refused():
    with pytest.raises(CallRefusedError, match="only a worker can offer KV"):
        offers.check_offer(peer_of(offer(), Role.SCHEDULER))


def request(*groups: pb.GroupCopies) -> pb.CopyBlocksRequest:
    return pb.CopyBlocksRequest(groups=groups)


def copies(*slots: tuple[int, int], blocks: tuple[int, ...] = (), group: int = 0) -> pb.GroupCopies:
    return pb.GroupCopies(
        group=group,
        slots=service.pack_slots(slots),
        blocks=np.array(blocks or (0, 9) * len(slots), "<u4").tobytes(),
    )


def test_parse_copies_returns_the_blocks_of_each_slot():
    parsed = offers.parse_copies(request(copies((3, 7), (1, 8), blocks=(9, 0, 4, 4))), peer_of(offer()), 5)
    assert [(copy.group, copy.slot, copy.blocks.tolist()) for copy in parsed] == [
        (0, Slot(3, 7), [9, 0]),
        (0, Slot(1, 8), [4, 4]),
    ]


@pytest.mark.parametrize(
    ("copy_request", "sentence"),
    [
        (request(copies((1, 1), group=1)), "no pages of group 1 were offered"),
        (request(copies((1, 1), blocks=(1, 2, 3))),
         "1 slots of group 0 need 2 blocks of 4 bytes, not 12 bytes"),
        (request(copies((1, 1), blocks=(1, 10))), "blocks of group 0 must be below 10"),
        (request(copies((1, 1), blocks=(1, (1 << 32) - 1))), "blocks of group 0 must be below 10"),
        (request(copies((5, 1))), "row 5 is out of range"),
        (request(copies((1, 1), (1, 1))), "slots must be of different rows"),
        (request(copies((1, 1)), copies((1, 2))), "slots must be of different rows"),
        (request(copies(*((row, 1) for row in range(257)))), "at most 256"),
        (request(*[copies((row, 1)) for row in range(5)] * 60), "at most 64 groups"),
        (request(pb.GroupCopies(slots=b"x" * 17)), "17 bytes are not a multiple"),
        (request(pb.GroupCopies(slots=b"x" * 8), pb.GroupCopies(slots=b"x" * 8)),
         "not a multiple|out of range"),
    ],
)  # fmt: skip
def test_invalid_copy_is_refused_with_a_reason(copy_request, sentence):
    with pytest.raises(CallRefusedError, match=sentence):
        offers.parse_copies(copy_request, peer_of(offer()), 5)


def test_copy_without_an_offer_is_refused():
    with pytest.raises(CallRefusedError, match="no pages of group 0 were offered"):
        offers.parse_copies(request(copies((1, 1))), peer_of(TransferOffer()), 5)
