"""The lower tiers that the configuration asks for."""

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
    """One lower tier; ``off_reason`` says why there is none though it was asked for."""

    address: str
    """For people: holds no secret."""

    tier: LowerTier | None
    off_reason: str = ""
    shards: ShardsFile | None = None
    """To be followed."""
    traffic: TieredStats = field(default_factory=TieredStats)
    """What went between it and memory, over all formats of the arena."""


def open_tiers(config: Config, opened: ExitStack) -> dict[str, TierHandle]:
    """By name, in the order in which they are asked; ``opened`` closes them. Raises ConfigError for a secret
    that can't be read, unless it is to stay up."""
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

    def present() -> Address:
        """Read again for every connection: mounted secrets are rotated while we run."""
        try:
            return config.present(address)
        except ConfigError as error:
            raise ConnectionError(str(error)) from error

    # A wrong path is a mistake that shows at the start. In a pod it is a secret that is not there yet, or was
    # declared after the pod was made: the other tiers do their work meanwhile.
    if not config.stay_up:
        config.present(address)
    remote = RemoteTier(address, timeout_seconds=config.remote_timeout_seconds, present=present)
    shards = ShardsFile(config.remote_shards_file, remote) if config.remote_shards_file else None
    if shards is not None:
        shards.follow()  # before anybody asks the wrong ones
    return TierHandle(str(address), remote, shards=shards)


def _open_disk(config: Config) -> TierHandle | None:
    """A disk is a help, not a need: without it the sidecar does its work."""
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
"""All lower tiers there are, in the order in which they are asked; None: it was not asked for."""
