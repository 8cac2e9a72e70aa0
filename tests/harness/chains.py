"""A request's row keys in one KV group, as most tests of the tiers use them."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache.kv_groups import KVGroup
from lmcache.tiers.memory.contracts import Chains

CHUNK_TOKENS = 256


def one_chain(keys: Sequence[bytes], chunk_bytes: int = 4096) -> Chains:
    """Keys of full attention."""
    return Chains(CHUNK_TOKENS, (KVGroup(0, 16, chunk_bytes),), (keys,))
