"""The lower tiers that the configuration asks for."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache.tiers.remote import RemoteTier
from lmcache_sidecar.config import Config


@dataclass(frozen=True)
class Configured:
    """One lower tier; ``off_reason`` says why there is none though it was asked for."""

    address: str  # for people: holds no secret
    tier: RemoteTier | None
    off_reason: str = ""


def open_tiers(config: Config) -> dict[str, Configured]:
    """By name, in the order in which they are asked. Raises ConfigError for a secret that can't be read."""
    tiers = {}
    if config.remote_url:
        remote = RemoteTier(config.full_remote_url, timeout_seconds=config.remote_timeout_seconds)
        tiers["remote"] = Configured(str(remote.address), remote)
    return tiers
