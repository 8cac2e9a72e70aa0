"""A tiered store over a disk and a fake remote tier, for model-based tests."""

import asyncio
import logging
import tempfile
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis.stateful import RuleBasedStateMachine

from lmcache.tiers.disk.tier import DiskTier
from lmcache.tiers.memory.contracts import Slot
from lmcache.tiers.stats import WriteSkipped
from lmcache.tiers.tiered import refresh as hits
from lmcache.tiers.tiered import tier_worker as lower_module
from lmcache.tiers.tiered.store import Admit
from tests.harness.tiered_world import TIMEOUT_SECONDS, FakeTier, FaultyDisk, World, chain

T = TypeVar("T")

NUM_ROWS = 16
NUM_QUEUED = NUM_ROWS // 4  # capacity of a write queue
KEYS = chain(32)
COLUMNS = (0, 1)


class Errors(logging.Handler):
    """Errors that background work logged."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(self.format(record))


class TieredStoreMachine(RuleBasedStateMachine):
    """A tiered store over a real disk and a fake remote tier; subclasses add the rules."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(lower_module, "_OFFER_SECONDS", 0.002)
        self.patch.setattr(lower_module, "_MAX_OFFER_SECONDS", 0.01)
        self.patch.setattr(hits, "_PAUSE_SECONDS", 0.001)
        self.errors = Errors()
        logging.getLogger("lmcache.tiers").addHandler(self.errors)
        self.runner = asyncio.Runner()
        self.folder = Path(tempfile.mkdtemp(prefix="lmc-tiered-"))
        self.disk = DiskTier(self.folder, 64 << 20)
        self.tiers: dict[str, FaultyDisk | FakeTier] = {"disk": FaultyDisk(self.disk), "remote": FakeTier()}
        self.leases: dict[str, dict[bytes, Slot]] = {}
        self.writes: list[tuple[list[bytes], asyncio.Task[set[WriteSkipped]]]] = []
        self.acknowledged: set[tuple[bytes, str]] = set()
        self.damaged: set[tuple[bytes, str]] = set()
        self.admit = Admit.ALL
        self.open_world(None)

    def run(self, work) -> T:
        return self.runner.run(asyncio.wait_for(work, TIMEOUT_SECONDS))

    def open_world(self, arena) -> None:
        async def make() -> World:
            world = World(NUM_ROWS, arena, self.tiers["disk"], self.admit, remote=self.tiers["remote"])
            await world.store.adopt()
            return world

        self.world = self.run(make())
        for owner in self.world.store.memory.quarantined_owners:
            self.world.store.memory.end_quarantine(owner)
        self.world.store.memory.release_adopted()
