"""The lower tiers that the configuration asks for."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from lmcache.tiers.base import TierError
from lmcache.tiers.disk import DiskTier
from lmcache.tiers.remote import RemoteTier
from lmcache_sidecar.config import Config

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Configured:
    """One lower tier; ``off_reason`` says why there is none though it was asked for."""

    address: str  # for people: holds no secret
    tier: RemoteTier | DiskTier | None
    off_reason: str = ""


def open_tiers(config: Config) -> dict[str, Configured]:
    """By name, in the order in which they are asked. Raises ConfigError for a secret that can't be read."""
    tiers = {}
    if config.disk_path:
        tiers["disk"] = _open_disk(config)
    if config.remote_url:
        remote = RemoteTier(config.full_remote_url, timeout_seconds=config.remote_timeout_seconds)
        tiers["remote"] = Configured(str(remote.address), remote)
    return tiers


def _open_disk(config: Config) -> Configured:
    """A disk is a help, not a need: without it the sidecar does its work."""
    try:
        return Configured(config.disk_path, DiskTier(config.disk_path, config.disk_size))
    except TierError as error:
        logger.error("The disk tier is off: --disk-path: %s", error)
        return Configured(config.disk_path, None, str(error))
