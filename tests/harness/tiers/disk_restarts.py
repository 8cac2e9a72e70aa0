"""Restarts of a disk tier over the same directory, and the addresses of test buffers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from lmcache_store.tiers.disk.tier import DiskTier
from lmcache_store.tiers.encryption.pieces import Cipher
from tests.harness.tiers.disk_world import PAGE


@contextmanager
def restartable_tier(path: Path) -> Iterator[Callable[..., DiskTier]]:
    """Yield a function that starts a tier in place of the last tier, without waiting for its index."""
    running: list[DiskTier] = []

    def stop() -> None:
        while running:
            running.pop().close()

    def start(capacity: int = 32 * PAGE, cipher: Cipher | None = None) -> DiskTier:
        stop()
        running.append(DiskTier(path, capacity, cipher))
        return running[0]

    yield start
    stop()


def address_of(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data
