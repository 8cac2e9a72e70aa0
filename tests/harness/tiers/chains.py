"""A request's row keys in one KV group, as most tests of the tiers use them."""

from collections.abc import Sequence

from lmcache_store.kv_groups import KVGroup
from lmcache_store.tiers.memory.contracts import Chains

CHUNK_TOKENS = 256


def one_chain(keys: Sequence[bytes], chunk_bytes: int = 4096, num_handed_over: int = 0) -> Chains:
    """Keys of full attention."""
    group = KVGroup(0, 16, chunk_bytes)
    return Chains(CHUNK_TOKENS, (group,), (keys,), num_handed_over=num_handed_over)
