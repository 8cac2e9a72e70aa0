"""Reads between the memory tiers of pods: the server of this pod, and the list of the others.

The sidecar follows the file with the list while it runs:

.. code-block:: yaml

    peers: ["10.0.1.7:9465", "10.0.2.3:9465"]
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from lmcache_sidecar.config import Config, ConfigError, read_text
from lmcache_sidecar.files.shards import endpoints_of, warn_of_unknown
from lmcache_sidecar.files.watched_files import FollowedFile
from lmcache_sidecar.peer_server.rows import PeerRows
from lmcache_sidecar.peer_server.server import PeerServer
from lmcache_store.common.options import read_yaml
from lmcache_store.tiers.base import LowerTier
from lmcache_store.tiers.peers.tier import PeersTier
from lmcache_store.tiers.remote.address import DEFAULT_PREFIX, Endpoint, parse_endpoints
from lmcache_store.tiers.tiered.store import TieredStore

logger = logging.getLogger(__name__)

_MAX_PEERS = 1024


def passwords_of(config: Config) -> Callable[[], list[str]] | None:
    """Return a function that reads the passwords of peers; the first is this pod's own. None: there are none.

    The function raises OSError if the file can't be read, or is empty.
    """
    path, flag = config.peer_password_file, "--peer-password-file: "
    if not path:
        return None

    def read() -> list[str]:
        try:
            text = read_text(path, flag)
        except ConfigError as error:
            raise ConnectionError(str(error)) from error
        passwords = [line.strip() for line in text.splitlines() if line.strip()]
        if not passwords:
            raise ConnectionError(f"{flag}{path} is empty: write a password")
        return passwords

    return read


class PeersFile(FollowedFile):
    """The peers file; see the module's description."""

    def __init__(self, path: str, name: str, tier: PeersTier, *, of_part: bool = False) -> None:
        """Read no file yet. Raises ConfigError if ``name`` is no host and port.

        Args:
            name: the entry of this pod, which is left out.
            of_part: leave out pods whose number in their engine differs from that of this pod.
        """
        super().__init__(path)
        try:
            self._excluded = parse_endpoints([name] if name else [])
        except ValueError as error:
            raise ConfigError(f"--peer-name: {error}") from error
        self._tier, self._of_part = tier, of_part

    def use(self, content: str) -> None:
        """Give the list to the tier. Raises ValueError, naming file and key."""
        keys = read_yaml(self.path, content)
        warn_of_unknown(self.path, keys, ("peers",))
        peers = endpoints_of(self.path, keys, "peers", _MAX_PEERS)
        parts = set(map(_part_of, self._excluded if self._of_part else peers))
        readable = (peer for peer in peers if peer not in self._excluded)
        self._tier.set_peers([peer for peer in readable if _part_of(peer) in parts])

    @property
    def used(self) -> tuple[str, str]:
        """Subject and present value, for the log."""
        return "The list of peers", self._tier.address


def _part_of(pod: Endpoint) -> str:
    return pod.host.partition(".")[0].rpartition("-")[2]


def start_peer_server(
    config: Config,
    loop: asyncio.AbstractEventLoop,
    store: Callable[[], TieredStore | None],
    tier: LowerTier | None,
) -> PeerServer | None:
    """Serve the memory tier to other pods, if the configuration says so. Raises ConfigError.

    ``store`` returns the present store. The loop calls it. ``tier``: the tier over the other pods, if any.
    """
    if config.peer_port is None:
        return None
    rows = PeerRows(loop, store, tier if isinstance(tier, PeersTier) else None)
    passwords = passwords_of(config)
    server = PeerServer(
        rows, DEFAULT_PREFIX, passwords=passwords, tls=config.peer_tls, bytes_per_second=config.peer_bandwidth
    )
    try:
        port = server.start(config.peer_host, config.peer_port)
    except (OSError, UnicodeError) as error:
        where = f"{config.peer_host}:{config.peer_port}"
        raise ConfigError(f"--peer-port: can't listen on {where}: {error}") from error
    logger.info("Other pods can read this memory tier on port %d", port)
    return server


async def hand_over(store: TieredStore, tier: LowerTier | None, name: str, seconds: float) -> None:
    """Offer the hottest rows to the other pods, which read them before this pod ends."""
    rows = store.hottest_rows() if isinstance(tier, PeersTier) and name else []
    if not rows or not isinstance(tier, PeersTier):
        return
    began = time.monotonic()
    try:
        num_taken = await asyncio.to_thread(tier.hand_over, rows, name, seconds)
    except RuntimeError as error:  # no thread can be started
        logger.warning("No rows were handed over to other pods: %s", error)
        return
    passed = time.monotonic() - began
    logger.info("Other pods took %d of %d rows over, in %.1f s", num_taken, len(rows), passed)
