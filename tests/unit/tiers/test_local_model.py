"""Model-based test of the local store: bytes, counts, eviction order and victims for longer payloads."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmcache_store.tiers.memory.contracts import Geometry
from lmcache_store.tiers.memory.local import LocalStore
from lmcache_store.tiers.memory.private import PrivateArena
from tests.harness.scope import examples
from tests.harness.tiers.memory_oracle import Order

SLOT = 4096
FRAME = 16
NUM_EXAMPLES = examples(60)
KEYS = [number.to_bytes(64, "big") for number in range(12)]
numbers = st.integers(0, len(KEYS) - 1)
lengths = st.one_of(st.integers(0, 4 * SLOT), st.integers(1, FRAME + 1).map(SLOT.__mul__))
requests = st.sampled_from(["r0", "r1", None])


class LocalMachine(RuleBasedStateMachine):
    """Also the defects 13, 14 and 15 of LMCache 0.1-0.3: wrong counts, evicted heads, wasted bytes."""

    @initialize(num_slots=st.integers(1, 3 * FRAME))
    def begin(self, num_slots):
        self.arena = PrivateArena(Geometry(SLOT, 1), num_slots)
        self.store = LocalStore(self.arena)
        self.num_slots = num_slots
        self.present: dict[int, tuple[int, bytes]] = {}  # key -> (first slot, payload)
        self.order = Order()
        self.readers: list[tuple] = []  # context, request, [(key, (first slot, payload))]
        self.version = 0

    def slots(self, place: tuple[int, bytes]) -> range:
        first, payload = place
        return range(first, first + max(1, -(-len(payload) // SLOT)))

    def held(self) -> set[int]:
        return {slot for _, _, places in self.readers for _, place in places for slot in self.slots(place)}

    def is_held(self, number: int) -> bool:
        return any((number, self.present[number]) in places for _, _, places in self.readers)

    @rule(number=numbers, length=lengths, request=requests, fails=st.sampled_from([False] * 5 + [True]))
    def put(self, number, length, request, fails):
        self.version += 1
        payload = (self.version.to_bytes(4, "big") * (length // 4 + 1))[:length]
        filled: list[int] = []

        def fill(row: int) -> None:
            filled.append(row)
            self.arena.view(row, 0, length)[:] = payload
            if fails:
                raise ValueError

        sparing = None if number in self.present else request
        evicted, fits = self.choose_victims(max(1, -(-length // SLOT)), sparing)
        try:
            assert self.store.put(KEYS[number], length, fill, request=request) == fits
        except ValueError:
            assert fails
        for other in evicted:
            del self.present[other]
            self.order.remove(other)
        assert bool(filled) == fits
        if fits:
            place = filled[0], payload
            payload_slots = self.slots(place)
            assert payload_slots[0] // FRAME == payload_slots[-1] // FRAME
            assert self.used_slots().isdisjoint(payload_slots)
            if not fails:
                self.present[number] = place
                self.order.remove(number)
                self.order.add_tail(number, request or object())

    def used_slots(self) -> set[int]:
        return {slot for place in self.present.values() for slot in self.slots(place)} | self.held()

    def choose_victims(self, num_slots: int, sparing: str | None) -> tuple[list[int], bool]:
        """Return the keys to evict for a payload of ``num_slots``, and whether it fits afterwards."""
        evicted: list[int] = []
        held = self.held()
        while True:
            used_slots = (
                self.used_slots() - {slot for number in evicted for slot in self.slots(self.present[number])}
                | held
            )
            runs = self.runs(num_slots)
            if num_slots <= FRAME and any(used_slots.isdisjoint(run) for run in runs):
                return evicted, True
            victims = [number for number in self.order.victims(sparing) if number not in evicted]
            ways = [
                (way, {*way} <= {*victims[: position + 1]})
                for position, victim in enumerate(victims)
                for way in self.ways_to_free(victim, num_slots, {*evicted}, held)
            ]
            # Ways that evict only the next victims come first; other ways also evict later neighbours.
            way = next((way for way, is_next in ways if is_next), ways[0][0] if ways else None)
            if way is None or num_slots > FRAME:
                return evicted, False
            evicted += way

    def runs(self, num_slots: int) -> list[range]:
        firsts = range(self.num_slots - num_slots + 1)
        return [range(first, first + num_slots) for first in firsts if first % FRAME + num_slots <= FRAME]

    def ways_to_free(self, victim: int, num_slots: int, evicted: set[int], held: set[int]) -> list[list[int]]:
        victim_slots = self.slots(self.present[victim])
        if len(victim_slots) >= num_slots:
            return [[victim]]
        runs = [run for run in self.runs(num_slots) if victim_slots[0] in run and victim_slots[-1] in run]
        remaining = {
            number: self.slots(place) for number, place in self.present.items() if number not in evicted
        }
        ways = [
            [number for number, slots in remaining.items() if not set(slots).isdisjoint(run)]
            for run in runs
            if held.isdisjoint(run)
        ]
        return sorted(ways, key=lambda way: sum(len(remaining[number]) for number in way))

    @rule(first=numbers, count=st.integers(1, 6), request=requests)
    def begin_to_read(self, first, count, request):
        requested = range(first, min(len(KEYS), first + count))
        context = self.store.pin_prefix([KEYS[number] for number in requested], request)
        rows = context.__enter__()
        places = []
        for number in requested:
            if number not in self.present:
                break
            places.append((number, self.present[number]))
            self.order.remove(number)
        assert rows == [(place[0], len(place[1])) for _, place in places]
        self.readers.append((context, request or object(), places))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def end_reading(self, data):
        context, request, places = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        context.__exit__(None, None, None)
        used = [
            number
            for number, place in places
            if self.present.get(number) == place and not self.is_held(number)
        ]
        self.order.add_head(used, request)

    @rule(number=numbers)
    def remove(self, number):
        assert self.store.remove(KEYS[number]) == (number in self.present)
        self.present.pop(number, None)
        self.order.remove(number)

    @invariant()
    def store_matches_the_oracle(self):
        if not hasattr(self, "store"):
            return
        for number, key in enumerate(KEYS):
            assert (self.store.prefix([key]) == 1) == (number in self.present)
        for place in [
            *self.present.values(),
            *(place for _, _, places in self.readers for _, place in places),
        ]:
            assert bytes(self.arena.view(place[0], 0, len(place[1]))) == place[1]
        assert self.store.capacity_bytes == self.num_slots * SLOT
        assert self.store.num_bytes == len(self.used_slots()) * SLOT
        keys = self.store.keys()
        listed = [int.from_bytes(key, "big") for key in keys]
        victims = [number for number in self.order.victims() if number in self.present]
        assert listed[: len(victims)] == victims
        assert set(listed) == set(self.present)


TestLocalModel = LocalMachine.TestCase
TestLocalModel.settings = settings(max_examples=NUM_EXAMPLES, stateful_step_count=40)
