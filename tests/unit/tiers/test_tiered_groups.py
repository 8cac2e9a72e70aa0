"""Joint lookups of several KV groups over memory and two lower tiers, against an oracle.

The oracle: a lookup finds the longest hit over the rows of all tiers.
"""

import asyncio

from hypothesis import example, given, settings
from hypothesis import strategies as st

from lmcache_store.kv_groups import GroupKind, KVGroup, longest_hit
from lmcache_store.tiers.memory.contracts import Chains, Geometry, LookupResult, Reserved
from lmcache_store.tiers.memory.private import PrivateArena
from lmcache_store.tiers.tiered.store import TieredStore
from tests.harness.scope import examples
from tests.harness.tiers.tiered_world import LEASE, NAMESPACE, OWNER, FakeTier

NUM_CHUNKS, CHUNK_TOKENS, SLOT_BYTES, NUM_SLOTS = 7, 64, 4096, 256
KINDS = {
    "full": KVGroup(0, 16, 3 * SLOT_BYTES),
    "other full": KVGroup(1, 16, 2 * SLOT_BYTES - 5),
    "short window": KVGroup(2, 16, SLOT_BYTES, 33, GroupKind.SLIDING_WINDOW),
    "long window": KVGroup(3, 16, 2 * SLOT_BYTES, 140, GroupKind.SLIDING_WINDOW),
    "attention chunk": KVGroup(4, 16, 2 * SLOT_BYTES, 192, GroupKind.CHUNKED_ATTENTION),
    "state": KVGroup(5, 64, 100, 0, GroupKind.STATE),
}
MODELS = [
    ("full",),
    ("full", "short window"),
    ("full", "other full", "long window"),
    ("long window",),
    ("short window", "long window"),
    ("full", "attention chunk"),
    ("full", "state"),
    ("full", "short window", "long window", "state"),
]

bits = st.lists(st.sampled_from([0, 1, 1]), min_size=NUM_CHUNKS, max_size=NUM_CHUNKS).map(bytes)


def key(group: KVGroup, chunk: int) -> bytes:
    return NAMESPACE + bytes([group.group, chunk]) * 16


def content(row_key: bytes, group: KVGroup) -> bytes:
    return (row_key * (group.chunk_bytes // 64 + 1))[: group.chunk_bytes]


class Tier(FakeTier):
    """A fake tier for rows of one column and any length."""

    def touch(self, keys, num_columns):
        return {row_key for row_key in keys if (row_key, 0) not in self.objects}


class GroupWorld:
    """A store over two lower tiers, with rows of one to three slots."""

    def __init__(self, names: tuple[str, ...], num_slots: int = NUM_SLOTS) -> None:
        self.groups = tuple(KINDS[name] for name in names)
        self.arena = PrivateArena(Geometry(SLOT_BYTES, 1, 3), num_slots)
        self.tiers = [Tier(), Tier()]
        self.now = 0.0
        self.store = TieredStore(
            self.arena, dict(zip(("disk", "remote"), self.tiers, strict=True)), clock=lambda: self.now
        )
        self.store.register(NAMESPACE)

    def chains(self, num_chunks: int = NUM_CHUNKS) -> Chains:
        keys = tuple([key(group, chunk) for chunk in range(num_chunks)] for group in self.groups)
        return Chains(CHUNK_TOKENS, self.groups, keys)

    def put(self, group: KVGroup, chunk: int) -> None:
        row_key = key(group, chunk)
        [(result, slot)] = self.store.reserve(
            [row_key], 0, OWNER, length=group.chunk_bytes, first_chunk=chunk, request="stores"
        )
        assert result is Reserved.SLOT
        self.arena_view(slot, group)[:] = content(row_key, group)
        self.store.commit([slot], 0, OWNER)

    def arena_view(self, slot, group: KVGroup) -> memoryview:
        (view,) = self.store.memory.views(slot)
        return view[: group.chunk_bytes]

    def resident(self) -> set[tuple[int, int]]:
        chunks = range(NUM_CHUNKS)
        return {
            (group.group, chunk)
            for group in self.groups
            for chunk in chunks
            if self.store.memory.is_resident(key(group, chunk))
        }

    async def settle(self, request: str = "r", seconds: float = 2.0) -> LookupResult:
        """Look up until the answer no longer changes, also for rows that were absent before."""
        latest = None
        while True:
            answer = self.store.lookup((LEASE[0], request), self.chains(), is_hint=True)
            if not answer.num_pending and not answer.is_probing:
                if answer == latest:
                    return answer
                latest = answer
                self.now += seconds
            await asyncio.sleep(0)

    def longest(self, *residencies: list[bytes]) -> int:
        joined = [bytes(map(any, zip(*parts, strict=True))) for parts in zip(*residencies, strict=True)]
        return longest_hit(self.groups, CHUNK_TOKENS, joined, 0, NUM_CHUNKS)

    def needed(self, num_chunks: int) -> set[tuple[int, int]]:
        return {(self.groups[index].group, chunk) for chunk, index in self.chains().places(num_chunks)}


def run_with(names, residencies, test) -> None:
    """Run ``test`` over a world whose memory and tiers hold these rows."""

    async def main() -> None:
        world = GroupWorld(names)
        await world.store.adopt()
        try:
            memory, *lower = residencies
            for index, group in enumerate(world.groups):
                for chunk in range(NUM_CHUNKS):
                    if memory[index][chunk]:
                        world.put(group, chunk)
            assert await world.store.drain(60)
            for tier, present in zip(world.tiers, lower, strict=False):
                tier.objects = {
                    (key(group, chunk), 0): content(key(group, chunk), group)
                    for index, group in enumerate(world.groups)
                    for chunk in range(NUM_CHUNKS)
                    if present[index][chunk]
                }
            for tier in world.tiers[len(lower) :]:
                tier.objects.clear()
            async with asyncio.timeout(60):
                await test(world)
        finally:
            await world.store.close()

    asyncio.run(main())


@st.composite
def cases(draw, num_tiers: int):
    names = draw(st.sampled_from(MODELS))
    return names, [[draw(bits) for _ in names] for _ in range(num_tiers)]


@settings(max_examples=examples(60))
@given(cases(num_tiers=2))
def test_lower_tier_promotes_exactly_the_rows_of_the_longest_hit(case):
    names, residencies = case

    async def test(world: GroupWorld) -> None:
        before = world.resident()
        end = world.longest(*residencies)
        assert await world.settle() == LookupResult(end)
        added = world.resident() - before
        assert added == world.needed(end) - before
        assert world.tiers[0].calls["load"] == len(added)

    run_with(names, residencies, test)


@settings(max_examples=examples(60))
@example(
    (
        ("full", "other full", "long window"),
        [
            [bytes(7)] * 3,
            [bytes(7), b"\0\1\0\0\0\0\0", b"\0\1\0\0\0\0\0"],
            [b"\1\1\0\0\0\0\0", b"\1\0\0\0\0\0\0", b"\1\0\0\0\0\0\1"],
        ],
    )
)
@given(cases(num_tiers=3))
def test_two_lower_tiers_promote_the_longest_hit_of_all_tiers(case):
    names, residencies = case

    async def test(world: GroupWorld) -> None:
        end = world.longest(*residencies)
        assert (await world.settle()).num_resident == end
        answer = world.store.lookup(LEASE, world.chains(end)) if end else LookupResult()
        assert answer == LookupResult(end, end)
        for chunk, index in world.chains().places(end):
            group = world.groups[index]
            slot = world.store.memory._rows.slot(world.store.memory._rows.find(key(group, chunk)))
            assert bytes(world.arena_view(slot, group)) == content(key(group, chunk), group)

    run_with(names, residencies, test)


@settings(max_examples=examples(30))
@given(cases(num_tiers=2))
def test_unreadable_rows_shorten_the_hit_to_the_readable_rows(case):
    """The tier claims to hold all rows, but some are invalid: the longest valid hit is promoted."""
    names, (memory, below) = case

    async def test(world: GroupWorld) -> None:
        invalid = {}
        for index, group in enumerate(world.groups):
            for chunk in range(NUM_CHUNKS):
                if not below[index][chunk]:
                    invalid[key(group, chunk), 0] = FakeTier.INVALID
        world.tiers[0].objects |= invalid
        assert (await world.settle(seconds=0.1)).num_resident == world.longest(memory, below)

    run_with(names, [memory, below], test)
