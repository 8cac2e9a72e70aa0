"""Rows of the soak test: their keys, and the bytes that every client expects under a key."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from lmcache_store import keys
from lmcache_store.tiers.base import ROW_KEY_BYTES

NAMESPACE = hashlib.sha256(b"soak").digest()
CHUNK_TOKENS, BLOCK_TOKENS = 256, 16
ROW_BYTES = 64 << 10
NUM_PROMPTS, NUM_CHUNKS = 120, 8
"""Prompts, and chunks of each. All rows together take 60 MiB, which only Redis can hold."""

SALTS = "search", "batch", "guest"
"""Cache salts of the requests. The tenants file names the first two; the last one has the default budget."""
TENANTS = (*SALTS[:-1], "default")
"""Names of their budgets."""

_STEPS = np.arange(ROW_BYTES // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def row_keys(prompt: int) -> bytes:
    """Return the joined row keys of a prompt's chunks."""
    digests = (hashlib.sha256(b"%d/%d" % (prompt, chunk)).digest() for chunk in range(NUM_CHUNKS))
    return b"".join(NAMESPACE + digest for digest in digests)


def tenant(prompt: int) -> bytes:
    """Return the tenant whose prompt this is."""
    return keys.tenant(SALTS[prompt % len(SALTS)], NAMESPACE)


def words(joined: bytes) -> npt.NDArray[np.uint64]:
    """Return row keys in the format of the index: ``[n, 8]`` words."""
    return np.frombuffer(joined, np.uint64).reshape(-1, ROW_KEY_BYTES // 8)


def content(prompt: int, chunk: int) -> npt.NDArray[np.uint8]:
    """Return the bytes of a row. No word of it repeats in another place or another row."""
    return (_STEPS + np.uint64((prompt * NUM_CHUNKS + chunk + 1) << 40)).view(np.uint8)
