"""The engine's copies between device memory and the arena. Needs a GPU: `make gpu-check`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lmcache.engines.core.cuda_copier import CudaCopier
from lmcache.engines.core.layout import Layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here"),
]

LAYERS, BLOCKS, PAGE_BYTES, BLOCKS_PER_CHUNK = 4, 64, 8192, 16
TABLE = [5, 60, 7, 1, 33, 2, 18, 40, 9, 11, 63, 0, 21, 22, 23, 50]


@pytest.fixture
def layout():
    generator = torch.Generator().manual_seed(0)
    shape = (LAYERS, BLOCKS, PAGE_BYTES)
    storage = torch.randint(0, 255, shape, dtype=torch.uint8, generator=generator).cuda()
    return Layout(tuple(storage), BLOCKS_PER_CHUNK)


@pytest.fixture
def slots(layout):
    return np.zeros((2, layout.row_bytes), np.uint8)


def chunk_of(layout):
    """What a slot must hold: the blocks in order, each with its layers."""
    return torch.stack([pages[TABLE] for pages in layout.pages], dim=1).cpu().numpy().reshape(-1)


def test_a_stored_chunk_is_the_blocks_in_order(layout, slots):
    copier = CudaCopier({0: layout})
    copier.store(0, slots[1], TABLE, copier.fence())
    np.testing.assert_array_equal(slots[1], chunk_of(layout))
    assert not slots[0].any()


def test_a_load_brings_back_only_its_blocks(layout, slots):
    copier = CudaCopier({0: layout})
    copier.store(0, slots[0], TABLE, copier.fence())
    before = [pages.clone() for pages in layout.pages]
    for pages in layout.pages:
        pages[TABLE] = 0
    copier.load(0, slots[0], 4, TABLE[4:], copier.fence())
    for pages, old in zip(layout.pages, before, strict=True):
        assert torch.equal(pages[TABLE[4:]], old[TABLE[4:]])
        assert not pages[TABLE[:4]].any()


def test_a_store_waits_for_the_work_before_its_fence(layout, slots):
    copier = CudaCopier({0: layout})
    torch.cuda._sleep(200_000_000)  # cycles: the write below has not begun when the store is asked for
    for pages in layout.pages:
        pages[TABLE] = 7
    copier.store(0, slots[0], TABLE, copier.fence())
    assert (slots[0] == 7).all()
