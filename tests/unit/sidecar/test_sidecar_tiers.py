"""Lower tiers of the sidecar: an additional tier needs only a line in the sidecar's table."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

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
from testing.child_process import wait_until
from tests.harness.engine import assert_stored, load, store
from tests.harness.sidecar.in_process import run_sidecar
from tests.harness.sidecar.wire import attached, make_hello, make_keys
from tests.harness.tiers.tiered_world import FakeTier


class Attic(FakeTier):
    """A tier that the sidecar does not have."""

    address = "attic:under the roof"

    def close(self) -> None:
        self.calls["close"] += 1


@pytest.fixture
def attic(monkeypatch: pytest.MonkeyPatch) -> Attic:
    tier = Attic()
    monkeypatch.setitem(lower_tiers.TIERS, "attic", lambda _config: TierHandle(tier.address, tier))
    return tier


def with_session(folder: Path, use: Callable[[Sidecar, SidecarSession], None]) -> None:
    """Run a sidecar, and call ``use`` in another thread with an engine's session."""
    config = Config(socket=str(folder / "socket"), memory_size=8 << 20, http_port=0)

    def use_session(sidecar: Sidecar) -> None:
        client = SidecarClient(config.socket, make_hello())
        client.start()
        try:
            session = attached(client)
            wait_until(lambda: document(sidecar.stats())["memory"]["usable_rows"] > 0)
            use(sidecar, session)
        finally:
            client.close()

    run_sidecar(config, lambda sidecar: asyncio.to_thread(use_session, sidecar))


def test_additional_tier_needs_only_a_line_in_the_table(
    attic: Attic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process does not see its own record locks, and the client is in this process.
    monkeypatch.setattr(LockProbe, "is_held", lambda _probe: True)
    # A sidecar keeps these open until its process ends.
    monkeypatch.setattr(liveness, "_open", lambda _path: -1)

    def write(sidecar: Sidecar, session: SidecarSession) -> None:
        store(session, 1, 2, 3)
        wait_until(lambda: document(sidecar.stats())["attic"]["written"] == 3)
        stats = document(sidecar.stats())["attic"]
        assert (stats["address"], stats["is_reachable"], stats["off_reason"]) == (Attic.address, True, "")
        page = asyncio.run(metrics.render(CallStats(), sidecar.stats())).decode()
        assert 'lmcache_tier_written_total{tier="attic"} 3.0' in page
        wait_until(lambda: attic.calls["check"])

    def promote(sidecar: Sidecar, session: SidecarSession) -> None:
        wait_until(lambda: session.lookup("r", [(0, make_keys(1, 2, 3))]).num_leased == 3)
        assert_stored(load(session, session, "r", 1, 2, 3), 1, 2, 3)
        assert document(sidecar.stats())["attic"]["promoted"] == 3

    with_session(tmp_path, write)
    assert attic.calls["close"]
    (tmp_path / "arena").unlink()
    with_session(tmp_path, promote)


def test_opened_tiers_are_closed_when_a_later_tier_is_invalid(
    attic: Attic, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_config: Config) -> TierHandle:
        raise ConfigError("no such file")

    monkeypatch.setitem(lower_tiers.TIERS, "wrong", refuse)
    with pytest.raises(ConfigError, match="no such file"), ExitStack() as opened:
        open_tiers(Config(), opened)
    assert attic.calls["close"]
