"""Buffers for transfers with O_DIRECT."""

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from lmcache_store.tiers.pages import PAGE_BYTES, transfer_buffer

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def address_of(memory):
    return np.frombuffer(memory, np.uint8).ctypes.data


def flags_of(memory):
    """Return the kernel's flags of the mapping at the begin of ``memory``; "hg" means huge pages."""
    address = address_of(memory)
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        begin, end = (int(bound, 16) for bound in mapping.split(maxsplit=1)[0].split("-"))
        if begin <= address < end:
            flags = re.search(r"VmFlags: (.*)", mapping)
            assert flags
            return flags[1].split()
    raise AssertionError("no mapping")


@pytest.mark.parametrize("num_bytes", [1, PAGE_BYTES, (1 << 20) + 48, (4 << 20) + 2 * PAGE_BYTES])
def test_buffer_is_aligned_writable_and_has_its_length(num_bytes):
    buffer = transfer_buffer(num_bytes)
    assert len(buffer) == num_bytes
    assert not any(buffer)
    assert address_of(buffer) % mmap.PAGESIZE == 0
    buffer[:] = b"x" * num_bytes
    assert bytes(buffer) == b"x" * num_bytes


@pytest.mark.skipif(not SETTING.exists(), reason="the kernel has no huge pages")
def test_large_buffer_asks_for_huge_pages():
    """A kernel with fragmented memory may still give small ones."""
    assert "hg" in flags_of(transfer_buffer((4 << 20) + 2 * PAGE_BYTES))
    assert "hg" not in flags_of(transfer_buffer(PAGE_BYTES))
