"""The lower tiers that the configuration asks for."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from lmcache.tiers.disk.tier import DiskTier
from lmcache.tiers.errors import TierError
from lmcache.tiers.remote.tier import RemoteTier
from lmcache.tiers.stats import TieredStats
from lmcache_sidecar.config import Config, ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TierHandle:
    """One lower tier; ``off_reason`` says why there is none though it was asked for."""

    address: str  # for people: holds no secret
    tier: RemoteTier | DiskTier | None
    off_reason: str = ""
    traffic: TieredStats = field(default_factory=TieredStats)
    """What went between it and memory, over all formats of the arena."""


def open_tiers(config: Config) -> dict[str, TierHandle]:
    """By name, in the order in which they are asked. Raises ConfigError for a secret that can't be read."""
    # The remote tier first: it may be a mistake, and then the directory must not stay taken.
    remote = {"remote": _make_remote(config)} if config.remote_url else {}
    return ({"disk": _open_disk(config)} if config.disk_path else {}) | remote


def _make_remote(config: Config) -> TierHandle:
    def credentials() -> tuple[str, str]:
        """Read again for every connection: mounted secrets are rotated while we run."""
        try:
            return config.read_credentials()
        except ConfigError as error:
            raise ConnectionError(str(error)) from error

    if config.has_credential_files:
        config.read_credentials()  # a wrong path is a mistake that shows at the start
    remote = RemoteTier(
        config.remote_url,
        timeout_seconds=config.remote_timeout_seconds,
        credentials=credentials if config.has_credential_files else None,
    )
    return TierHandle(str(remote.address), remote)


def _open_disk(config: Config) -> TierHandle:
    """A disk is a help, not a need: without it the sidecar does its work."""
    try:
        return TierHandle(config.disk_path, DiskTier(config.disk_path, config.disk_size))
    except TierError as error:
        logger.error("The disk tier is off: --disk-path: %s", error)
        return TierHandle(config.disk_path, None, str(error))
