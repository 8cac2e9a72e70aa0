"""Lower tiers of the sidecar: an additional tier needs only a line in the sidecar's table."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lmcache_client.rpc.client import SidecarClient
from lmcache_client.rpc.session import SidecarSession
from lmcache_sidecar import lower_tiers
from lmcache_sidecar.calls import CallStats
from lmcache_sidecar.clients import liveness
from lmcache_sidecar.clients.liveness import LockProbe
from lmcache_sidecar.config import Config, ConfigError
from lmcache_sidecar.lower_tiers import TierHandle, open_tiers
from lmcache_sidecar.pages import metrics
from lmcache_sidecar.pages.stats import document
from lmcache_sidecar.sidecar import Sidecar
from lmcache_store.tiers.base import Loaded, LowerTier, ObjectId, RowKey
from lmcache_store.tiers.circuit import Circuit
from lmcache_store.tiers.header import digests as digests_of
from lmcache_store.tiers.stats import ObjectStats
from testing.child_process import wait_until
from tests.harness.engine import assert_stored, load, store
from tests.harness.sidecar.wire import attached, make_hello, make_keys


class DictTier:
    """A lower tier of this test that stores objects in a dictionary."""

    address = "attic:under the roof"
    takes_writes = True
    is_encrypted = False
    residence_seconds = math.inf

    def __init__(self) -> None:
        self.health = Circuit("attic", lambda: None)
        self.stats = ObjectStats()
        self.objects: dict[ObjectId, bytes] = {}
        self.calls: set[str] = set()

    @property
    def used_bytes(self) -> int:
        return sum(map(len, self.objects.values()))

    def check(self) -> None:
        self.calls.add("check")

    def rate_of(self, keys: Sequence[RowKey]) -> float | None:
        return None

    def find_each(self, ids: Sequence[ObjectId]) -> list[bool]:
        return [object_id in self.objects for object_id in ids]

    def load(self, object_id: ObjectId, into: memoryview, length: int | None = None) -> Loaded | None:
        payload = self.objects[object_id]
        into[: len(payload)] = payload
        self.stats.hits += 1
        return Loaded(len(payload), digests_of(payload))

    def store(
        self, object_id: ObjectId, payload: memoryview, label: bytes = b"", digests: bytes = b""
    ) -> bool:
        self.objects[object_id] = bytes(payload)
        self.stats.stored += 1
        return True

    def touch(self, keys: Sequence[RowKey], num_columns: int) -> set[RowKey]:
        return set()

    def close(self) -> None:
        self.calls.add("close")


class RunningSidecar:
    """A sidecar whose event loop runs in a separate thread."""

    def __init__(self, folder: Path) -> None:
        self.socket_path = str(folder / "socket")
        self._config = Config(socket=self.socket_path, memory_size=8 << 20, http_port=0)
        self._is_up, self._is_over = threading.Event(), threading.Event()
        self._sidecar: Sidecar | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> RunningSidecar:
        self._thread.start()
        assert self._is_up.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    async def _run(self) -> None:
        self._sidecar = Sidecar(self._config, CallStats())
        await self._sidecar.start()
        self._is_up.set()
        await asyncio.to_thread(self._is_over.wait)
        await self._sidecar.stop()

    def stats(self) -> dict[str, Any]:
        assert self._sidecar is not None
        return document(self._sidecar.stats())

    def metrics(self) -> str:
        assert self._sidecar is not None
        return asyncio.run(metrics.render(CallStats(), self._sidecar.stats())).decode()

    @contextlib.contextmanager
    def session(self) -> Iterator[SidecarSession]:
        client = SidecarClient(self.socket_path, make_hello())
        client.start()
        try:
            session = attached(client)
            wait_until(lambda: self.stats()["memory"]["usable_rows"] > 0)
            yield session
        finally:
            client.close()


@pytest.fixture
def dict_tier(monkeypatch: pytest.MonkeyPatch) -> DictTier:
    tier: LowerTier = DictTier()
    monkeypatch.setitem(lower_tiers.TIERS, "attic", lambda _config: TierHandle(str(tier.address), tier))
    assert isinstance(tier, DictTier)
    return tier


def test_additional_tier_needs_only_a_line_in_the_table(
    dict_tier: DictTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process does not see its own record locks, and the client is in this process.
    monkeypatch.setattr(LockProbe, "is_held", lambda _probe: True)
    monkeypatch.setattr(
        liveness, "_open", lambda _path: -1
    )  # a sidecar keeps these open until its process ends
    with RunningSidecar(tmp_path) as sidecar, sidecar.session() as session:
        store(session, 1, 2, 3)
        wait_until(lambda: sidecar.stats()["attic"]["written"] == 3)
        tier_stats = sidecar.stats()["attic"]
        address_and_state = tier_stats["address"], tier_stats["is_reachable"], tier_stats["off_reason"]
        assert address_and_state == (dict_tier.address, True, "")
        assert (tier_stats["stored"], tier_stats["used_bytes"]) == (3, dict_tier.used_bytes) == (3, 300_000)
        assert 'lmcache_tier_written_total{tier="attic"} 3.0' in sidecar.metrics()
        wait_until(lambda: "check" in dict_tier.calls)
    assert "close" in dict_tier.calls

    (tmp_path / "arena").unlink()
    with RunningSidecar(tmp_path) as sidecar, sidecar.session() as session:
        wait_until(lambda: session.lookup("r", [(0, make_keys(1, 2, 3))]).num_leased == 3)
        assert_stored(load(session, session, "r", 1, 2, 3), 1, 2, 3)
        tier_stats = sidecar.stats()["attic"]
        assert (tier_stats["promoted"], tier_stats["hits"]) == (3, 3)


def test_opened_tiers_are_closed_when_a_later_tier_is_invalid(
    dict_tier: DictTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_config: Config) -> TierHandle:
        raise ConfigError("no such file")

    monkeypatch.setitem(lower_tiers.TIERS, "wrong", refuse)
    with pytest.raises(ConfigError, match="no such file"), ExitStack() as opened:
        open_tiers(Config(), opened)
    assert "close" in dict_tier.calls
