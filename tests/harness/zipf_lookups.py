"""Lookups over documents of falling popularity, for miss-ratio curves."""

from lmcache_store.curves import HASHES, Lookup
from tools.simulate import key_hash

SIZES = [1000 * 2 ** (i / 2) for i in range(12, 29)]
"""Sizes in bytes at which tests compare curves."""


def zipf(num_requests: int, salt: int) -> list[Lookup]:
    """Return requests of a few chunks over documents of falling popularity, with a common system prompt."""
    lookups = []
    for request in range(num_requests):
        document = int(2000 ** ((key_hash(request * 7 + salt) / HASHES) ** 0.7)) + 1
        chain = [0, *(document * 100 + chunk for chunk in range(8))]
        keys = [key_hash(key) for key in reversed(chain)]
        lookups.append(Lookup(request * 0.1, keys, 1000))
    return lookups


def num_accesses(lookups: list[Lookup]) -> int:
    return sum(len(lookup.keys) for lookup in lookups)
