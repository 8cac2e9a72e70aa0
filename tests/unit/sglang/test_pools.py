"""Pages of SGLang's host pools, copied from and to slots of the arena."""

import math
import threading
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from lmcache_client.core.copier import RowLoad
from lmcache_client.errors import UnsupportedError
from lmcache_client.sglang.pools import PoolCopier, layout_of
from tests.harness.scope import examples

PAGES, PAGE, LAYERS, HEADS, DIM = 6, 4, 3, 2, 5


class Pool:
    """A host pool over one tensor; ``axis`` is the tensor's dimension of tokens or pages."""

    layout = "test"

    def __init__(self, shape, axis, *, is_by_page, dtype=torch.bfloat16, offset=0):
        self.page_size, self.size, self.dtype = PAGE, PAGE * PAGES, dtype
        self._axis, self._is_by_page = axis, is_by_page
        memory = torch.zeros(math.prod(shape) + offset, dtype=dtype)
        self.buffer = memory[offset:].view(shape)

    def fill(self, seed):
        numbers = np.random.default_rng(seed).integers(0, 256, self.buffer.numel() * 8, np.uint8)
        raw = torch.from_numpy(numbers)[: self.buffer.numel() * self.buffer.element_size()]
        self.buffer.copy_(raw.view(self.dtype).view(self.buffer.shape))

    def get_data_page(self, index, flat=True):
        start, length = (index // PAGE, 1) if self._is_by_page else (index, PAGE)
        page = self.buffer.narrow(self._axis, start, length)
        return page.flatten() if flat else page

    def set_from_flat_data_page(self, index, data_page):
        page = self.get_data_page(index, flat=False)
        page.copy_(data_page.reshape(page.shape))

    def get_dummy_flat_data_page(self):
        return torch.zeros(self.get_data_page(0).numel(), dtype=self.dtype)


class CopyingPool(Pool):
    """A pool whose pages are not in one place, such as that of states."""

    def get_data_page(self, index, flat=True):
        return super().get_data_page(index, flat).clone()

    def set_from_flat_data_page(self, index, data_page):
        page = super().get_data_page(index, flat=False)
        page.copy_(data_page.reshape(page.shape))


class MovedPool(Pool):
    """A pool whose later pages do not follow the first two at equal distances."""

    order = (0, 1, 5, 3, 2, 4)

    def get_data_page(self, index, flat=True):
        return super().get_data_page(self.order[index // PAGE] * PAGE, flat)


SHAPES = {
    "layer_first": ((2, LAYERS, PAGE * PAGES, HEADS, DIM), 2, False, 2 * LAYERS),
    "page_first": ((2, PAGE * PAGES, LAYERS, HEADS, DIM), 1, False, 2),
    "page_first_direct": ((2, PAGES, LAYERS, PAGE, HEADS, DIM), 1, True, 2),
    "page_head": ((2, PAGES, HEADS, PAGE, LAYERS, DIM), 1, True, 2),
    "mla_layer_first": ((LAYERS, PAGE * PAGES, 1, DIM), 1, False, LAYERS),
    "mla_page_first": ((PAGE * PAGES, LAYERS, 1, DIM), 0, False, 1),
    "mla_page_first_direct": ((PAGES, LAYERS, PAGE, 1, DIM), 0, True, 1),
    "indexer_layer_first": ((LAYERS, PAGES, 7), 1, True, LAYERS),
}
"""Shapes of SGLang's pools, their axis of tokens or pages, whether it is one of pages, and runs of a page."""

DTYPES = [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn]


def make_pool(name, kind=Pool, **fields):
    shape, axis, is_by_page, _ = SHAPES[name]
    return kind(shape, axis, is_by_page=is_by_page, **fields)


def raw(tensor):
    """The bytes of a tensor."""
    dense = tensor.clone(memory_format=torch.contiguous_format)  # also one element with a stride of several
    return dense.view(torch.uint8).view(-1).numpy().copy()


def slot_for(copier, group=0):
    return np.full(copier.row_bytes[group] + 100, 0xEE, np.uint8)


def check_copies(pool):
    """Each page is stored and restored alone, as the pool's own functions would."""
    copier = PoolCopier({0: pool}, 1)
    pool.fill(1)
    slots = []
    for page in range(PAGES):
        slots.append(slot_for(copier))
        copier.store(0, slots[-1], [page], None)
        expected = raw(pool.get_data_page(page * PAGE, flat=True))
        assert copier.row_bytes[0] == len(expected)
        assert np.array_equal(slots[-1][: len(expected)], expected)
        assert (slots[-1][len(expected) :] == 0xEE).all()
    pool.fill(2)
    pages = [raw(pool.get_data_page(page * PAGE)) for page in range(PAGES)]
    for page in (4, 0, PAGES - 1):
        copier.load([RowLoad(0, slots[page], 0, [page])], None)
        pages[page] = slots[page][: copier.row_bytes[0]]
        for number, expected in enumerate(pages):
            assert np.array_equal(raw(pool.get_data_page(number * PAGE)), expected), (page, number)
    copier.close()


@pytest.mark.parametrize("fields", [*({"dtype": dtype} for dtype in DTYPES), {"offset": 13}], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_page_is_copied_as_the_pool_would_in_runs_as_long_as_the_layout_allows(name, fields):
    """Without the pool's own functions, also if it begins inside its memory."""
    pool = make_pool(name, **fields)
    layout = layout_of(pool)
    assert (layout.blocks_per_row, [len(pages) for pages in layout.pages]) == (1, [PAGES] * SHAPES[name][3])
    check_copies(pool)


@pytest.mark.parametrize("kind", [CopyingPool, MovedPool])
@pytest.mark.parametrize("name", SHAPES)
def test_page_that_is_no_view_or_at_unequal_distances_is_copied_by_the_pool(name, kind):
    pool = make_pool(name, kind)
    assert layout_of(pool) is None
    check_copies(pool)


def test_pool_whose_pages_move_is_copied_by_its_own_functions():
    """SGLang's UnifiedPageEnvelopeHostPool also refuses to show a page that is not in use."""
    pool = make_pool("page_first_direct")
    pool.stores_page_envelope = True
    check_copies(pool)
    copier = PoolCopier({0: pool}, 1)
    pool.fill(3)
    slot = slot_for(copier)
    pool.get_data_page = lambda index, flat=True: Pool.get_data_page(pool, index ^ PAGE, flat)
    copier.store(0, slot, [0], None)
    assert np.array_equal(slot[: copier.row_bytes[0]], raw(Pool.get_data_page(pool, PAGE)))
    copier.close()


@pytest.mark.parametrize("error", [NotImplementedError("no pages"), ValueError("Unsupported layout: x")])
def test_pool_without_pages_is_refused(error):
    def fail(index, flat):
        raise error

    pool = SimpleNamespace(get_data_page=fail, page_size=PAGE, layout="x")
    with pytest.raises(UnsupportedError, match=f"layout x has no pages to copy: {error}"):
        layout_of(pool)


def test_each_group_copies_its_own_pool():
    pools = {
        0: make_pool("page_first_direct"),
        1: make_pool("indexer_layer_first", dtype=torch.uint8),
        2: make_pool("layer_first", CopyingPool),
    }
    copier = PoolCopier(pools, 2)
    for group, pool in pools.items():
        pool.fill(group)
        slot = slot_for(copier, group)
        copier.store(group, slot, [3], None)
        assert np.array_equal(slot[: copier.row_bytes[group]], raw(pool.get_data_page(3 * PAGE)))
    threads = set()
    copier.share(lambda: threads.add(threading.get_ident()))
    copier.close()
    assert len(threads) <= 2


@settings(max_examples=examples(60))
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    axis=st.integers(0, 4),
    is_by_page=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_any_regular_pool(shape, axis, is_by_page, order):
    """Dimensions in any order in memory."""
    axis = min(axis, len(shape))
    shape.insert(axis, PAGES if is_by_page else PAGE * PAGES)
    pool = Pool(shape, axis, is_by_page=is_by_page)
    dimensions = list(range(len(shape)))
    order.shuffle(dimensions)
    stored = torch.zeros([shape[dimension] for dimension in dimensions], dtype=torch.bfloat16)
    pool.buffer = stored.permute([dimensions.index(dimension) for dimension in range(len(shape))])
    check_copies(pool)
