"""Unusable rows, not populated or vacated: the tier does not reserve, lease or evict rows for them."""

from lmcache.tiers.memory.contracts import Geometry, Reserved
from lmcache.tiers.memory.private import PrivateArena
from lmcache.tiers.memory.tier import MemoryTier
from tests.harness.chains import one_chain

OWNER = b"o" * 16


class TestUsableRows:
    def tier(self, num_rows: int = 8) -> MemoryTier:
        tier = MemoryTier(PrivateArena(Geometry(4096, 1), num_rows))
        list(tier.adopt())
        return tier

    def store(self, tier: MemoryTier, name: int) -> Reserved:
        result, slot = tier.reserve(bytes([name]) * 64, 0, OWNER, length=4096)
        if slot:
            tier.commit([slot], 0, OWNER)
        return result

    def test_unusable_rows_are_neither_reserved_nor_leased(self):
        tier = self.tier()
        tier.usable_slots = 2
        assert [self.store(tier, name) for name in (1, 2)] == [Reserved.SLOT] * 2
        tier.usable_slots = 1
        assert tier.lookup((b"e" * 16, "r"), one_chain([bytes([1]) * 64])).num_resident == 1
        assert tier.lookup((b"e" * 16, "r"), one_chain([bytes([2]) * 64])).num_resident == 0
        assert self.store(tier, 3) is Reserved.SLOT
        assert tier.lookup((b"e" * 16, "r"), one_chain([bytes([3]) * 64])).num_resident == 1

    def test_evicts_only_reusable_rows_and_only_when_needed(self):
        tier = self.tier()
        for name in range(8):
            self.store(tier, name)
        tier.usable_slots = 2
        assert self.store(tier, 8) is Reserved.SLOT
        tier.lookup((b"e" * 16, "r"), one_chain([bytes([8]) * 64]))
        assert [self.store(tier, name) for name in (9, 10)] == [Reserved.SLOT] * 2
        tier.usable_slots = 8
        assert [name for name in range(11) if tier.is_resident(bytes([name]) * 64)] == [
            2,
            3,
            4,
            5,
            6,
            7,
            8,
            10,
        ]

    def test_evicts_no_row_when_no_row_is_usable(self):
        tier = self.tier(2)
        for name in (1, 2):
            self.store(tier, name)
        tier.usable_slots = 0
        assert self.store(tier, 3) is Reserved.BUSY
        tier.usable_slots = 2
        assert tier.is_resident(bytes([1]) * 64)
        assert tier.is_resident(bytes([2]) * 64)
