"""Copies of the engine between device memory and the arena."""

import ctypes
import gc
import os
import threading
from concurrent import futures

import numpy as np
import pytest
import torch

from lmcache_client.core import cuda_copier
from lmcache_client.core.copier import STAGING_GROUP, CpuCopier, RowLoad
from lmcache_client.core.cuda_copier import CudaCopier, make_copier
from lmcache_client.core.layout import Layout
from lmcache_client.cuda import ipc
from lmcache_client.cuda.driver import Device, GpuStream
from lmcache_client.cuda.errors import CudaError
from lmcache_client.cuda.pins import Pins
from lmcache_client.rpc.hello import Allocation
from testing.cuda_memory import gate, pages

pytestmark = pytest.mark.gpu

LAYERS, BLOCKS, PAGE_BYTES, BLOCKS_PER_ROW = 4, 64, 8192, 16
TABLE = [5, 60, 7, 1, 33, 2, 18, 40, 9, 11, 63, 0, 21, 22, 23, 50]
ROW_BYTES = LAYERS * BLOCKS_PER_ROW * PAGE_BYTES
KV_BYTES = LAYERS * BLOCKS * PAGE_BYTES


@pytest.fixture
def memory(context):
    """Random KV in a tensor in device memory."""
    content = torch.randint(0, 255, (KV_BYTES,), dtype=torch.uint8, generator=torch.manual_seed(0))
    if "CUDASIM_NODE" not in os.environ:
        yield content.cuda()
        return
    address = int(context.call("cuMemAlloc", KV_BYTES))
    tensor = torch.frombuffer((ctypes.c_char * KV_BYTES).from_address(address), dtype=torch.uint8)
    yield tensor.copy_(content)
    context.call("cuMemFree", address)


@pytest.fixture(params=["by layer", "by block"])
def layout(memory, request):
    """Both memory orders of engines."""
    if request.param == "by layer":
        kv = memory.view(LAYERS, BLOCKS, PAGE_BYTES)
    else:
        kv = memory.view(BLOCKS, LAYERS, PAGE_BYTES).transpose(0, 1)
    return Layout(tuple(kv), BLOCKS_PER_ROW)


@pytest.fixture
def copier(layout):
    copier = make_copier({3: layout})
    assert isinstance(copier, CudaCopier), "the driver must report the KV as device memory"
    yield copier
    copier.close()


def new_slots():
    return pages(2 * ROW_BYTES).reshape(2, ROW_BYTES)


@pytest.fixture
def slots():
    return new_slots()


def pin(copier, slots, num_rows=2):
    copier.prepare(slots, num_rows)
    assert copier.pins.wait(60)


def clear(layout):
    for pages_ in layout.pages:
        pages_[TABLE] = 0


def row_of(layout):
    """Expected content of a slot: the blocks in order, each with its layers."""
    return torch.stack([pages[TABLE] for pages in layout.pages], dim=1).cpu().numpy().reshape(-1)


def test_stored_row_holds_the_blocks_in_order(copier, layout, slots):
    copier.store(3, slots[1], TABLE, copier.fence())
    np.testing.assert_array_equal(slots[1], row_of(layout))
    assert not slots[0].any()


@pytest.mark.parametrize("is_pinned", [False, True])
def test_load_restores_its_blocks_and_changes_no_other_byte(copier, layout, slots, is_pinned):
    if is_pinned:
        pin(copier, slots)
        assert copier.pins.pinned_bytes == slots.nbytes
    copier.store(3, slots[0], TABLE, copier.fence())
    expected = [pages.clone() for pages in layout.pages]
    for pages_, wanted in zip(layout.pages, expected, strict=True):
        pages_.zero_()
        loaded = wanted[TABLE[4:9]].clone()
        wanted.zero_()
        wanted[TABLE[4:9]] = loaded
    copier.load([RowLoad(3, slots[0], 4, TABLE[4:9])], copier.fence())
    for pages_, after in zip(layout.pages, expected, strict=True):
        assert torch.equal(pages_, after)


def test_rows_are_loaded_by_several_threads_concurrently(copier, layout, slots):
    copier.store(3, slots[0], TABLE, copier.fence())
    expected = [pages.clone() for pages in layout.pages]
    clear(layout)
    todo, fence = iter(range(0, BLOCKS_PER_ROW, 2)), copier.fence()

    def work():
        for first in todo:
            copier.load([RowLoad(3, slots[0], first, TABLE[first : first + 2])], fence)

    copier.share(work)
    for pages_, after in zip(layout.pages, expected, strict=True):
        assert torch.equal(pages_, after)


def test_store_waits_for_the_work_before_its_fence(copier, context, layout, memory, slots):
    """The forward pass may still be queued when its stores are requested."""
    pin(copier, slots)  # a copy of other memory may hold the driver until the gate opens
    compute = GpuStream(context, 0)
    with gate(context) as forward, futures.ThreadPoolExecutor(2) as threads:
        forward.hold(compute)
        context.call("cuMemsetD8Async", memory.data_ptr(), 7, KV_BYTES, compute.raw)
        fence = copier.fence()
        store = threads.submit(copier.store, 3, slots[0], TABLE, fence)
        wait = threads.submit(copier.wait, fence)
        assert not store.done()
        assert not wait.done()
        forward.open()
        store.result(60)
        wait.result(60)
    assert (slots[0] == 7).all()


def test_load_waits_for_the_work_before_its_fence(copier, context, layout, memory, slots):
    """Queued attention may still read the current content of the blocks."""
    slots[0] = 9
    pin(copier, slots)  # a copy of other memory may hold the driver until the gate opens
    compute = GpuStream(context, 0)
    with gate(context) as forward, futures.ThreadPoolExecutor(1) as threads:
        forward.hold(compute)
        context.call("cuMemsetD8Async", memory.data_ptr(), 7, KV_BYTES, compute.raw)
        load = threads.submit(copier.load, [RowLoad(3, slots[0], 0, TABLE)], copier.fence())
        forward.open()
        load.result(60)
    for pages_ in layout.pages:
        assert (pages_[TABLE] == 9).all()
        assert (pages_[[block for block in range(BLOCKS) if block not in TABLE]] == 7).all()


def test_block_that_holds_all_layers_is_copied_as_one_piece(copier, layout, slots, simulated):
    num_pieces_before = simulated.count("pieces")
    copier.store(3, slots[0], TABLE, copier.fence())
    is_by_block = layout.pages[0].stride(0) > PAGE_BYTES
    expected = len(TABLE) - 2 if is_by_block else len(TABLE) * LAYERS  # blocks 21, 22 and 23 form one piece
    assert simulated.count("pieces") - num_pieces_before == expected


@pytest.mark.parametrize("function", ["cuStreamWaitEvent", "cuMemcpyBatchAsync"])
def test_failed_copy_has_ended_and_the_next_copy_succeeds(copier, layout, slots, simulated, function):
    pin(copier, slots)
    simulated.order(f"fail {function} 1 999")
    with pytest.raises(CudaError, match=function):
        copier.store(3, slots[0], TABLE, copier.fence())
    simulated.order("")
    copier.store(3, slots[0], TABLE, copier.fence())
    np.testing.assert_array_equal(slots[0], row_of(layout))


def test_rows_are_copied_during_the_pauses_between_registrations(copier, layout, monkeypatch):
    """One extent of several is pinned when the copies run."""
    paused = threading.Event()
    monkeypatch.setattr(cuda_copier, "_PIN_EXTENT_BYTES", PAGE_BYTES)
    monkeypatch.setattr(cuda_copier, "_PIN_PAUSE_RATIO", 1e9)
    pause = Pins._pause

    def note_and_pause(pins: Pins, seconds: float) -> None:
        paused.set()
        pause(pins, seconds)

    monkeypatch.setattr(Pins, "_pause", note_and_pause)
    slots = new_slots()
    copier.prepare(slots, 2)
    assert paused.wait(60)
    copier.store(3, slots[0], TABLE, copier.fence())
    np.testing.assert_array_equal(slots[0], row_of(layout))
    clear(layout)
    copier.load([RowLoad(3, slots[0], 0, TABLE)], copier.fence())
    np.testing.assert_array_equal(slots[0], row_of(layout))
    assert copier.pins.pinned_bytes == PAGE_BYTES


def test_memory_is_pinned_while_the_engine_captures_graphs(copier, context, simulated):
    simulated.order("capture")
    slots = pages(ROW_BYTES)
    with futures.ThreadPoolExecutor(1) as other_thread:
        register = other_thread.submit(context.call, "cuMemHostRegister", slots.ctypes.data, ROW_BYTES, 0)
        with pytest.raises(CudaError, match="CAPTURE_UNSUPPORTED"):
            register.result()
    pin(copier, slots.reshape(1, ROW_BYTES), 1)
    assert (copier.pins.pinned_bytes, copier.pins.failures) == (ROW_BYTES, 0)


def test_memory_that_is_not_pinned_is_copied_in_single_pieces(copier, layout, simulated):
    slots = new_slots()
    single_copies, batches = simulated.count("single_copies"), simulated.count("batches")
    copier.store(3, slots[0], TABLE, copier.fence())
    np.testing.assert_array_equal(slots[0], row_of(layout))
    clear(layout)
    copier.load([RowLoad(3, slots[0], 0, TABLE)], copier.fence())
    np.testing.assert_array_equal(slots[0], row_of(layout))
    assert simulated.count("batches") == batches
    assert (pieces := simulated.count("single_copies")) > single_copies
    pin(copier, slots)
    copier.store(3, slots[1], TABLE, copier.fence())
    np.testing.assert_array_equal(slots[1], row_of(layout))
    assert (simulated.count("batches") - batches, simulated.count("single_copies")) == (1, pieces)


def test_mapping_is_unpinned_after_its_last_copy(copier, simulated):
    """The two copying threads switch to a new session one after the other."""
    old, new = (new_slots() for _ in range(2))
    pin(copier, old)
    slot_of_a_copy = old[1]
    pin(copier, new, 1)
    del old
    assert simulated.count("pinned_bytes") == 2 * ROW_BYTES, "a copy of the old mapping is in progress"
    pin(copier, new)
    assert simulated.count("pinned_bytes") == 4 * ROW_BYTES
    del slot_of_a_copy
    gc.collect()
    assert simulated.count("pinned_bytes") == 2 * ROW_BYTES


def test_close_waits_for_another_thread_that_unpins(layout, simulated, monkeypatch):
    """A thread of gRPC may drop the last reference to the mapping while the engine closes the copier."""
    copier = make_copier({3: layout})
    assert isinstance(copier, CudaCopier)
    mappings = [pages(2 * ROW_BYTES).reshape(2, ROW_BYTES)]
    copier.prepare(mappings[0], 2)
    assert copier.pins.wait(60)
    begun, closed, unpin = threading.Event(), threading.Event(), Pins._unpin

    def unpin_late(pins: Pins, number: int) -> None:
        begun.set()
        closed.wait(0.2)  # only a copier that does not wait is closed by then
        unpin(pins, number)

    monkeypatch.setattr(Pins, "_unpin", unpin_late)
    other_thread = threading.Thread(target=mappings.clear)
    other_thread.start()
    assert begun.wait(60)
    copier.close()
    closed.set()
    other_thread.join(60)
    assert simulated.count("pinned_bytes") == 0


def test_mapping_may_be_collected_while_its_copier_closes(layout, monkeypatch):
    """A garbage collection runs the mapping's finalizer in any thread, also in the one that closes."""
    copier, cycle = make_copier({3: layout}), []
    assert isinstance(copier, CudaCopier)
    cycle.append((pages(2 * ROW_BYTES).reshape(2, ROW_BYTES), cycle))
    copier.prepare(cycle[0][0], 2)
    assert copier.pins.wait(60)
    changed = copier.pins._changed
    notify = changed.notify_all
    monkeypatch.setattr(changed, "notify_all", lambda: (gc.collect(), notify()))
    del cycle
    closing = threading.Thread(target=copier.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()


def test_released_rows_are_unpinned_before_release_is_reported(copier, simulated):
    old, new = (new_slots() for _ in range(2))
    pin(copier, old)
    pin(copier, new)
    copier.prepare(new, 0, True)
    assert simulated.count("pinned_bytes") == 0, "no copy of any mapping is in progress"
    copier.prepare(new, 2, True)
    assert copier.pins.wait(60)
    assert simulated.count("pinned_bytes") == 2 * ROW_BYTES


def test_release_of_rows_that_stay_pinned_is_never_reported(copier, monkeypatch):
    old, new = (new_slots() for _ in range(2))
    pin(copier, old)

    def refuse(function: str, *arguments: object) -> object:
        if function == "cuMemHostUnregister":
            raise CudaError(function, 2, "CUDA_ERROR_OUT_OF_MEMORY")
        return call(function, *arguments)

    call = copier._context.call
    monkeypatch.setattr(copier._context, "call", refuse)
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        copier.prepare(old, 0, True)
    for _ in range(2):
        with pytest.raises(CudaError, match="an older mapping stays registered"):
            copier.prepare(new, 2, True)
    monkeypatch.undo()
    old_pins = copier._mappings[0][1]
    for number in old_pins._is_pinned.nonzero()[0].tolist():
        old_pins._unpin(number)


def test_a_thousand_sessions_leak_nothing(copier, simulated):
    counters = ("events", "streams", "pins", "mappings", "contexts")
    counts_before = [simulated.count(name) for name in counters]
    for _ in range(1000):
        slots = pages(4096).reshape(1, 4096)
        copier.prepare(slots, 1)
        copier.wait(copier.fence())
    del slots
    gc.collect()
    assert [simulated.count(name) for name in counters] == counts_before


def test_offer_lists_each_allocation_once_with_the_page_offsets(copier, context, layout, memory):
    offer = copier.offer()
    assert offer.gpu_uuid == Device.of(memory.data_ptr()).uuid
    exported = ipc.export(context, memory.data_ptr())
    assert offer.allocations == (Allocation(exported.handle, exported.num_bytes),)
    (group,) = offer.groups
    assert (group.group, group.num_blocks, group.blocks_per_row) == (3, BLOCKS, BLOCKS_PER_ROW)
    addresses = [exported.base + layer.offset for layer in group.layers]
    assert addresses == [pages_.data_ptr() for pages_ in layout.pages]
    assert {(layer.allocation, layer.page_bytes) for layer in group.layers} == {(0, PAGE_BYTES)}
    assert [layer.block_stride for layer in group.layers] == [pages_.stride(0) for pages_ in layout.pages]


def test_rows_reach_staging_blocks_that_are_not_offered(layout, memory, slots):
    staging = Layout(
        tuple(torch.zeros(LAYERS, BLOCKS, PAGE_BYTES, dtype=torch.uint8, device=memory.device)), 16
    )
    copier = make_copier({3: layout, STAGING_GROUP: staging})
    assert [group.group for group in copier.offer().groups] == [3]
    assert len(copier.offer().allocations) == 1
    copier.store(3, slots[0], TABLE, copier.fence())
    copier.load([RowLoad(STAGING_GROUP, slots[0], 0, range(32, 48))], copier.fence())
    for pages_, staged in zip(layout.pages, staging.pages, strict=True):
        assert torch.equal(staged[32:48], pages_[TABLE])
    copier.close()


def test_offer_gives_the_reason_if_memory_cannot_be_shared(copier, simulated):
    simulated.order("fail cuIpcGetMemHandle * 801")
    offer = copier.offer()
    assert not offer.allocations
    assert "can't be exported: cuIpcGetMemHandle" in offer.refusal


def test_offer_names_the_settings_that_make_memory_virtual(copier, simulated):
    """Memory of expandable segments and of sleep mode has no IPC handle."""
    simulated.order("fail cuPointerGetAttribute * 1")
    offer = copier.offer()
    assert not offer.allocations
    assert "expandable_segments in PYTORCH_ALLOC_CONF" in offer.refusal


def test_kv_in_host_memory_gets_the_cpu_copier(device):
    kv = torch.zeros(8, 4096, dtype=torch.uint8)
    assert isinstance(make_copier({0: Layout((kv,), 4)}), CpuCopier)
