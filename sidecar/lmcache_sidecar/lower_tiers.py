"""Opens the lower tiers that the configuration enables: disk and remote."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from lmcache.tiers.base import LowerTier
from lmcache.tiers.disk.tier import DiskTier
from lmcache.tiers.errors import TierError
from lmcache.tiers.remote.address import Address
from lmcache.tiers.remote.tier import RemoteTier
from lmcache.tiers.stats import TieredStats
from lmcache_sidecar.config import Config, ConfigError
from lmcache_sidecar.shards import ShardsFile

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TierHandle:
    """One enabled lower tier; ``off_reason`` says why ``tier`` is None."""

    address: str
    """Address for people, without secrets."""

    tier: LowerTier | None
    off_reason: str = ""
    shards: ShardsFile | None = None
    """Shards file to follow; None: the hosts of the URL are the shards."""
    traffic: TieredStats = field(default_factory=TieredStats)
    """Traffic between this tier and memory; not reset when the arena gets another format."""


def open_tiers(config: Config, opened: ExitStack) -> dict[str, TierHandle]:
    """Open the enabled tiers and return them by name, in lookup order. ``opened`` closes them on exit.

    Raises ConfigError for a secret that can't be read, unless the sidecar must stay up.
    """
    handles: dict[str, TierHandle] = {}
    for name, open_tier in TIERS.items():
        if (handle := open_tier(config)) is not None:
            handles[name] = handle
            if handle.tier is not None:
                opened.callback(handle.tier.close)
    return handles


def _open_remote(config: Config) -> TierHandle | None:
    address = config.remote_url
    if address is None:
        return None

    def current_address() -> Address:
        """Read the credentials for each new connection: mounted secrets rotate while the sidecar runs."""
        try:
            return config.with_credentials(address)
        except ConfigError as error:
            raise ConnectionError(str(error)) from error

    # A wrong path fails the start. In a pod, the secret may not exist yet, or be newer than the pod.
    # The other tiers work without it.
    if not config.stay_up:
        config.with_credentials(address)
    remote = RemoteTier(address, timeout_seconds=config.remote_timeout_seconds, present=current_address)
    shards = ShardsFile(config.remote_shards_file, remote) if config.remote_shards_file else None
    if shards is not None:
        shards.follow()  # so that the first request asks the right shards
    return TierHandle(str(address), remote, shards=shards)


def _open_disk(config: Config) -> TierHandle | None:
    """Open the disk tier. If that fails, the sidecar works without it."""
    if not config.disk_path:
        return None
    try:
        return TierHandle(config.disk_path, DiskTier(config.disk_path, config.disk_size))
    except TierError as error:
        logger.error("The disk tier is off: --disk-path: %s", error)
        return TierHandle(config.disk_path, None, str(error))


TIERS: dict[str, Callable[[Config], TierHandle | None]] = {
    "disk": _open_disk,
    "remote": _open_remote,
}
"""Functions that open each lower tier, in lookup order; they return None for a tier that is not enabled."""
