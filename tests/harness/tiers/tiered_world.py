"""A tiered store on a running loop, over lower tiers that a test holds, fails and heals."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import threading
from collections import Counter
from typing import Self

from lmcache_store.tiers.base import Loaded, LowerTier
from lmcache_store.tiers.circuit import Circuit
from lmcache_store.tiers.disk.tier import DiskTier
from lmcache_store.tiers.errors import TierUnavailableError
from lmcache_store.tiers.header import digests as digests_of
from lmcache_store.tiers.memory.contracts import Geometry, LookupResult, Reserved, Slot
from lmcache_store.tiers.memory.private import PrivateArena
from lmcache_store.tiers.stats import ObjectStats, TieredStats
from lmcache_store.tiers.tiered.store import Admit, TieredStore
from tests.harness.loops import in_a_loop
from tests.harness.tiers.chains import one_chain

NUM_COLUMNS = 2
SIZE = 4096
NAMESPACE = b"n" * 32
OWNER = b"o" * 16
LEASE = (b"e" * 16, "request")
TIMEOUT_SECONDS = 60.0  # of waits that end only with a defect


def chain(length: int, start: int = 0) -> list[bytes]:
    return [NAMESPACE + number.to_bytes(32, "big") for number in range(start, start + length)]


def content(key: bytes, column: int) -> bytes:
    return (key + bytes([column]) * 64) * (SIZE // 128)


class FaultyTier:
    """A ``LowerTier`` with faults. Operations in ``held`` wait at the gate ``open``."""

    address = "nowhere"
    used_bytes = None
    takes_writes = True
    is_local = False
    is_encrypted = False
    residence_seconds = math.inf

    def __init__(self) -> None:
        self.health = Circuit("tier", lambda: self._probe(), base=0.001, cap=0.01)
        self.stats = ObjectStats()
        self.calls: Counter[str] = Counter()
        self.held = {"probe", "load", "store"}
        self.open = threading.Event()
        self.open.set()
        self.is_unhealthy = False
        self.is_full = False
        self.refused: frozenset[bytes] = frozenset()  # keys of rows that it refuses
        self.num_waiting = 0
        self._lock = threading.Lock()  # protects the counts: the first count of a name runs Python code

    def hold(self, *names: str) -> None:
        """Let these operations wait, until ``open`` is set."""
        self.held = set(names)
        self.open.clear()

    def _enter(self, name: str) -> None:
        is_held = name in self.held
        with self._lock:
            self.calls[name] += 1
            self.num_waiting += is_held
        if is_held:
            assert self.open.wait(TIMEOUT_SECONDS)
            with self._lock:
                self.num_waiting -= 1
        if self.is_unhealthy:
            raise self.health.failure("unhealthy")

    def _takes(self, key: bytes) -> bool:
        return not self.is_full and key not in self.refused

    def check(self) -> None:
        self.calls["check"] += 1

    def rate_of(self, keys) -> float | None:
        return None

    def _probe(self) -> None:
        self.calls["health probe"] += 1
        if self.is_unhealthy:
            raise TierUnavailableError("unhealthy")


class FaultyDisk(FaultyTier):
    """A real disk tier behind the faults."""

    def __init__(self, disk: DiskTier) -> None:
        super().__init__()
        self.disk = disk

    def find_each(self, ids):
        self._enter("probe")
        return self.disk.find_each(ids)

    def load(self, object_id, into, length):
        self._enter("load")
        return self.disk.load(object_id, into, length)

    def store(self, object_id, payload, label, digests):
        self._enter("store")
        return self._takes(object_id.row_key) and self.disk.store(object_id, payload, label, digests)

    def touch(self, keys, num_columns):
        self._enter("touch")
        return self.disk.touch(keys, num_columns)


class FakeTier(FaultyTier):
    """Objects in a dict by (row key, column). An object that is ``INVALID`` does not match its checksum."""

    INVALID = b"invalid"

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[tuple[bytes, int], bytes] = {}
        self.touched: Counter[bytes] = Counter()
        self.labels: set[bytes] = set()
        self.misplaced: set[tuple[bytes, int]] = set()

    def find_each(self, ids):
        self._enter("probe")
        return [(object_id.row_key, object_id.column) in self.objects for object_id in ids]

    def load(self, object_id, into, length):
        self._enter("load")
        payload = self.objects.get((object_id.row_key, object_id.column))
        if payload is None or payload == self.INVALID:
            into[:3] = b"???"
            return None
        into[: len(payload)] = payload
        is_misplaced = (object_id.row_key, object_id.column) in self.misplaced
        return Loaded(len(payload), digests_of(payload), is_misplaced)

    def touch(self, keys, num_columns):
        self._enter("touch")
        self.touched.update(keys)
        return {key for key in keys for column in range(num_columns) if (key, column) not in self.objects}

    def store(self, object_id, payload, label, digests):
        self._enter("store")
        assert digests == digests_of(payload)
        is_accepted = self._takes(object_id.row_key)  # evaluated once: the test's thread may change it
        if is_accepted:
            self.misplaced.discard((object_id.row_key, object_id.column))
            self.objects[object_id.row_key, object_id.column] = bytes(payload)
            self.labels.add(label)
        return is_accepted

    def fill(self, keys: list[bytes]) -> None:
        self.objects.update({(key, column): content(key, column) for key in keys for column in range(2)})


class World:
    """A store on a running loop, with frequent operations of tests. ``disk`` is a tier in front of the remote
    tier."""

    def __init__(
        self,
        num_rows: int = 16,
        arena: PrivateArena | None = None,
        disk: LowerTier | None = None,
        admit: Admit = Admit.ALL,
        remote: FakeTier | None = None,
        stats: dict[str, TieredStats] | None = None,
    ) -> None:
        self.now = 0.0
        self.remote = remote or FakeTier()
        self.arena = arena or PrivateArena(Geometry(SIZE, NUM_COLUMNS), num_rows)
        tiers = {"remote": self.remote} if disk is None else {"disk": disk, "remote": self.remote}
        self.store = TieredStore(self.arena, tiers, admit=admit, stats=stats, clock=lambda: self.now)
        self.lower = self.store.lower["remote"]
        self.store.register(NAMESPACE, label=b"model", chunk_bytes=[SIZE])

    async def __aenter__(self) -> Self:
        await self.store.adopt()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.remote.open.set()
        await self.store.close()

    def fill(self, keys: list[bytes], column: int, request: str = "") -> list[Slot]:
        """Reserve slots and copy into them."""
        answers = self.store.reserve(keys, column, OWNER, length=SIZE, request=request)
        assert all(answer.result is Reserved.SLOT for answer in answers)
        for key, answer in zip(keys, answers, strict=True):
            self.arena.view(answer.slot.row, column)[:] = content(key, column)
        return [answer.slot for answer in answers]

    def put(self, keys: list[bytes], request: str = "") -> None:
        for column in range(NUM_COLUMNS):
            self.store.commit(self.fill(keys, column, request), column, OWNER)

    async def write(self, keys: list[bytes], request: str = "") -> None:
        """Put rows, and wait until the lower tiers have got them."""
        self.put(keys, request)
        assert await self.store.drain(TIMEOUT_SECONDS)

    def lookup(
        self, keys: list[bytes], request: str = "request", row_seconds: float = 0.0, num_handed_over: int = 0
    ) -> LookupResult:
        chains = one_chain(keys, SIZE, num_handed_over)
        return self.store.lookup((LEASE[0], request), chains, chunk_seconds=row_seconds)

    def slots(self, keys: list[bytes]) -> list[Slot]:
        """Slots of the leading keys in memory."""
        return slots_of(self.store, keys)

    @property
    def is_idle(self) -> bool:
        """Whether all work has ended, except the loops that wait for more work."""
        store = self.store
        num_tasks = len(store._tasks._tasks) + sum(len(lower._tasks._tasks) for lower in store.lower.values())
        is_ended = num_tasks == 1 + sum(lower.num_writers for lower in store.lower.values())
        return is_ended and not any(store.pending_work.values())

    async def until_resident(self, keys: list[bytes]) -> LookupResult:
        result = self.lookup(keys)
        while result.num_resident < len(keys):
            await asyncio.sleep(0.001)  # real time: polls
            result = self.lookup(keys)
        for key, slot in zip(keys, self.slots(keys), strict=True):
            for column in range(NUM_COLUMNS):
                assert bytes(self.arena.view(slot.row, column)) == content(key, column)
        return result


def slots_of(store: TieredStore, keys: list[bytes]) -> list[Slot]:
    rows = store.memory._rows
    return rows.slots(rows.prefix(keys))


async def until(condition) -> None:
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not condition():  # noqa: ASYNC110 (the condition has no event)
            await asyncio.sleep(0.001)  # real time: polls


def run(test=None, **options):
    """Run an async test with its own World, which is opened with these options, and with fixtures."""
    if test is None:
        return functools.partial(run, **options)

    async def in_world(**fixtures: object) -> None:
        async with World(**options) as world:
            await test(world, **fixtures)

    in_world.__name__, in_world.__doc__ = test.__name__, test.__doc__
    signature = inspect.signature(test)
    fixtures = list(signature.parameters.values())[1:]
    in_world.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
    return in_a_loop(in_world)
