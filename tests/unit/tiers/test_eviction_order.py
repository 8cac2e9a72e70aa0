"""Eviction order: a chain's tail before its head, however the chain was stored and read."""

import pytest

from lmcache.tiers.memory.contracts import Geometry
from lmcache.tiers.memory.private import PrivateArena
from lmcache.tiers.memory.tier import MemoryTier
from tests.harness.chains import one_chain

OWNER = b"o" * 16
ENGINE = b"e" * 16
NUM_ROWS = 32


def chain(length: int, start: int = 0) -> list[bytes]:
    return [bytes(32) + number.to_bytes(32, "big") for number in range(start, start + length)]


@pytest.fixture
def tier():
    tier = MemoryTier(PrivateArena(Geometry(4096, 1), NUM_ROWS))
    list(tier.adopt())
    return tier


def store(tier: MemoryTier, keys: list[bytes], request: str) -> None:
    """Reserve and commit the rows as an engine does in a step."""
    slots = [tier.reserve(key, 0, OWNER, length=4096, request=request).slot for key in keys]
    tier.commit(slots, 0, OWNER)


def use(tier: MemoryTier, keys: list[bytes], request: str) -> None:
    tier.lookup((ENGINE, request), one_chain(keys))
    tier.release((ENGINE, request))


def resident(tier: MemoryTier, keys: list[bytes]) -> list[int]:
    return [number for number, key in enumerate(keys) if tier.is_resident(key)]


def check_evicted_tail_first(tier: MemoryTier, keys: list[bytes]) -> None:
    for num_left in reversed(range(len(keys))):
        store(tier, chain(1, 1000 + num_left), "evicts")
        assert resident(tier, keys) == list(range(num_left))


def test_evicts_prompt_stored_over_several_steps_tail_first(tier):
    for step in range(4):
        store(tier, chain(8, 8 * step), "long")
    check_evicted_tail_first(tier, chain(32))


def test_evicts_prompt_stored_with_other_requests_tail_first(tier):
    for step in range(4):
        store(tier, chain(4, 4 * step), "long")
        store(tier, chain(4, 100 + 4 * step), "other")
    check_evicted_tail_first(tier, chain(16))


def test_evicts_prompt_with_cached_head_tail_first(tier):
    store(tier, chain(8), "earlier")
    tier.lookup((ENGINE, "long"), one_chain(chain(32)))
    for step in range(1, 4):
        store(tier, chain(8, 8 * step), "long")
    tier.release((ENGINE, "long"))
    check_evicted_tail_first(tier, chain(32))


def test_head_used_by_another_request_survives(tier):
    store(tier, chain(16), "long")
    store(tier, chain(16, 100), "other")
    use(tier, chain(4), "short")
    for number in range(12):
        store(tier, chain(1, 1000 + number), "evicts")
    assert resident(tier, chain(16)) == [0, 1, 2, 3]
    assert len(resident(tier, chain(16, 100))) == 16


def test_evicts_prompt_longer_than_the_lease_limit_tail_first(tier):
    store(tier, chain(32), "long")
    for _ in range(2):
        use(tier, chain(32), "again")
    check_evicted_tail_first(tier, chain(32))


def test_repeated_keys_in_a_lookup_keep_the_order(tier):
    store(tier, chain(32), "long")
    keys = chain(32)
    for _ in range(2):
        tier.lookup((ENGINE, "again"), one_chain([*keys[:20], *keys[:20]]))
        tier.release((ENGINE, "again"))
    check_evicted_tail_first(tier, chain(32))
