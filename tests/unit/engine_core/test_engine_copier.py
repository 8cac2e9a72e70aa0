"""Copies between engine tensors and slots, in every physical order of KV that an engine can choose."""

import mmap
import os
import threading
import time
from concurrent import futures

import numpy as np
import pytest
import torch

from lmcache_client.core.copier import CpuCopier, RowLoad, allowed_cores, use_all_cores
from lmcache_client.core.cuda_copier import make_copier
from lmcache_client.core.layout import Layout, page_views
from lmcache_client.errors import UnsupportedError
from tests.harness.client.kv_layouts import ORDERS, B, C, H, N, kv_caches


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_page_views_return_all_bytes_of_a_block_in_memory_order(order):
    caches = kv_caches(order)
    views = page_views(list(caches), caches, B)
    inner = [d for d in order if d > 1]
    for view, kv in zip(views, caches.values(), strict=True):
        assert view.shape == (B, H * N * C * 2)
        for block in range(B):
            in_memory_order = kv[block].permute([d - 2 for d in inner]).contiguous()
            assert view[block].numpy().tobytes() == in_memory_order.numpy().tobytes()
        view[2] = 0xFF
        assert (kv[2].contiguous().view(torch.uint8) == 0xFF).all(), "the view must share the engine's memory"
        assert not (kv[1].contiguous().view(torch.uint8) == 0xFF).all()


@pytest.mark.parametrize("order", [(0, 2, 1, 3, 4), (1, 2, 0, 3, 4)], ids=["LHBNC", "BHLNC"])
def test_page_views_refuse_scattered_blocks(order):
    caches = kv_caches(order)
    with pytest.raises(UnsupportedError, match="is not contiguous in memory"):
        page_views(list(caches), caches, B)


def test_page_views_join_kernel_blocks_and_skip_shared_layers():
    kv = torch.arange(6 * H * N * C, dtype=torch.float32).view(6, H, N, C)  # 3 blocks of 2 kernel blocks
    (view,) = page_views(["a", "b"], {"a": kv, "b": kv}, 3)
    assert view.shape == (3, 2 * H * N * C * 4)
    assert view[1].numpy().tobytes() == kv[2:4].numpy().tobytes()


def layout(num_blocks=9, pages=(64, 64, 64), blocks_per_row=4):
    kv = [torch.randint(0, 255, (num_blocks, page), dtype=torch.uint8) for page in pages]
    return Layout(tuple(kv), blocks_per_row)


PAGES = {"by numpy": (64, 64, 64), "streamed": (512, 4096, 512)}


def make_slot(num_bytes):
    """A buffer with the alignment of an arena slot."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


def test_golden_slot_bytes():
    """The order is [block][layer][page]. A change of it needs a new entry in the namespace's inputs."""
    pages = tuple(torch.tensor([[10 * layer + block] * 2 for block in range(4)]).byte() for layer in range(2))
    slot = np.zeros(16, np.uint8)
    make_copier({0: Layout(pages, blocks_per_row=2)}).store(0, slot, [3, 1], None)
    assert slot.tolist() == [3, 3, 13, 13, 1, 1, 11, 11] + [0] * 8


@pytest.mark.parametrize("pages", PAGES.values(), ids=PAGES)
@pytest.mark.parametrize(("first", "count"), [(0, 4), (0, 1), (1, 2), (3, 1)])
def test_load_fills_only_the_given_blocks(first, count, pages):
    source, target = layout(pages=pages), layout(pages=pages)
    slot = make_slot(32 << 10)
    slot[:] = 7
    CpuCopier({0: source}).store(0, slot, [8, 2, 5, 0], None)
    before = [kv.clone() for kv in target.pages]
    destination = [6, 1, 4, 3][:count]
    CpuCopier({0: target}).load([RowLoad(0, slot, first, destination)], None)
    for layer, expected in enumerate(before):
        expected[destination] = source.pages[layer][[8, 2, 5, 0][first : first + count]]
        assert torch.equal(target.pages[layer], expected)
    assert (slot[source.row_bytes :] == 7).all()


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_share_runs_work_in_all_threads_and_waits_for_them(num_threads):
    all_threads, ended = threading.Barrier(num_threads), []

    def work():
        all_threads.wait(60)
        ended.append(threading.get_ident())

    CpuCopier({0: layout(pages=PAGES["streamed"])}, num_threads).share(work)
    assert len(set(ended)) == num_threads


def test_share_raises_the_error_of_any_thread():
    main_thread = threading.get_ident()

    def work():
        if threading.get_ident() != main_thread:
            raise ValueError("in a helper thread")

    with pytest.raises(ValueError, match="in a helper thread"):
        CpuCopier({0: layout(pages=PAGES["streamed"])}, 2).share(work)


@pytest.mark.parametrize("pages", PAGES.values(), ids=PAGES)
def test_streamed_and_plain_stores_write_the_same_bytes(pages):
    source = layout(pages=pages)
    slot, unaligned = make_slot(source.row_bytes), make_slot(source.row_bytes + 4096)[16:]
    copier = CpuCopier({0: source})
    copier.store(0, slot, [8, 2, 5, 0], None)
    copier.store(0, unaligned, [8, 2, 5, 0], None)
    expected = torch.cat([kv[[8, 2, 5, 0]] for kv in source.pages], dim=1).view(-1).numpy()
    np.testing.assert_array_equal(slot, expected)
    np.testing.assert_array_equal(unaligned[: len(expected)], expected)


def test_streaming_copies_are_available():
    """vLLM includes the compiler that this needs. Without a compiler copies are only slower."""
    assert CpuCopier({0: layout(pages=PAGES["streamed"])})._groups[0].stream is not None
    assert CpuCopier({0: layout(pages=PAGES["by numpy"])})._groups[0].stream is None


@pytest.mark.parametrize("blocks", [[9], [-1], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("pages", PAGES.values(), ids=PAGES)
def test_copy_refuses_blocks_outside_the_kv_or_the_slot(pages, blocks):
    copier, slot = CpuCopier({0: layout(pages=pages)}), make_slot(32 << 10)
    with pytest.raises((ValueError, IndexError)):
        copier.load([RowLoad(0, slot, 0, blocks)], None)
    with pytest.raises((ValueError, IndexError)):
        copier.store(0, slot[: 4 << 10], blocks, None)


@pytest.mark.parametrize(("first", "blocks"), [(-1, [0]), (3, [0, 1]), (4, [0])])
def test_load_refuses_blocks_outside_the_row(first, blocks):
    copier, slot = CpuCopier({0: layout(pages=PAGES["streamed"])}), make_slot(32 << 10)
    with pytest.raises(ValueError, match="exceed the slot"):
        copier.load([RowLoad(0, slot, first, blocks)], None)


def test_spread_lets_threads_leave_the_core_of_their_creator():
    """vLLM binds its model thread to its first core, and child threads inherit that."""
    assert allowed_cores() >= os.sched_getaffinity(os.getppid())
    core = min(os.sched_getaffinity(0))

    def affinity_after_spread():
        os.sched_setaffinity(0, {core})
        with futures.ThreadPoolExecutor(1, initializer=use_all_cores) as executor:
            return executor.submit(os.sched_getaffinity, 0).result()

    with futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(affinity_after_spread).result() >= os.sched_getaffinity(os.getppid())


@pytest.mark.parametrize("page", [64, 512])
def test_copies_do_not_change_bytes_between_blocks(page):
    """Bytes between blocks are padding, or pages of other layers. Every KV group has its own pages."""
    memory = torch.randint(0, 255, (2, 9, 2 * page), dtype=torch.uint8)
    groups = {group: Layout((memory[group, :, :page],), 2) for group in range(2)}
    copier, slot, before = CpuCopier(groups), make_slot(2 * page), memory.clone()
    copier.store(1, slot, [8, 3], None)
    assert slot.tobytes() == memory[1, [8, 3], :page].numpy().tobytes()
    copier.load([RowLoad(0, slot, 0, [5, 2])], None)
    before[0, [5, 2], :page] = before[1, [8, 3], :page]
    assert torch.equal(memory, before)


@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize("pages", PAGES.values(), ids=PAGES)
def test_batch_of_rows_loads_the_same_bytes_as_single_rows(pages, is_aligned):
    """Two KV groups, rows of different lengths in any order."""
    single, batched = ({group: layout(pages=pages) for group in (0, 2)} for _ in range(2))
    row_bytes, loads = single[0].row_bytes, []
    for number, (group, first_block, blocks) in enumerate(
        [(0, 0, [8, 2, 5, 0]), (0, 1, [3, 1]), (2, 3, [7]), (0, 0, [4]), (2, 0, [0, 1, 2])]
    ):
        slot = make_slot(row_bytes + 4096)[0 if is_aligned else 16 :]
        slot[:] = np.random.default_rng(number).integers(0, 255, len(slot), np.uint8)
        loads.append(RowLoad(group, slot, first_block, blocks))
    for group in single:
        for mine, other in zip(single[group].pages, batched[group].pages, strict=True):
            other.copy_(mine)
    copier = CpuCopier(single)
    for row in loads:
        copier.load([row], None)
    CpuCopier(batched).load(loads, None)
    for group in single:
        for expected, actual in zip(single[group].pages, batched[group].pages, strict=True):
            assert torch.equal(expected, actual)


@pytest.mark.parametrize("direction", ["load", "store"])
def test_copies_release_the_gil(direction):
    layout_64_mib = Layout((torch.zeros(64, 1 << 20, dtype=torch.uint8),), 64)
    copier, slot = CpuCopier({0: layout_64_mib}), make_slot(64 << 20)
    progress, is_over = [], threading.Event()

    def count():
        while not is_over.is_set():
            progress.append(time.perf_counter())
            time.sleep(0)

    ids = list(range(64))
    copier.store(0, slot, ids, None)  # touches the pages first
    thread = threading.Thread(target=count)
    thread.start()
    start = time.perf_counter()
    for _ in range(4):
        copier.load([RowLoad(0, slot, 0, ids)], None) if direction == "load" else copier.store(
            0, slot, ids, None
        )
    end = time.perf_counter()
    is_over.set()
    thread.join()
    during_copies = [moment for moment in progress if start < moment < end]
    assert len(during_copies) > 20, "another thread must run during the copies"
