"""The list of the remote tier's shards: a file that is followed while it changes.

.. code-block:: yaml

    current: [cache-0.cache:6379, cache-1.cache:6379, cache-2.cache:6379]
    previous: [cache-0.cache:6379, cache-1.cache:6379]
    until: 2026-01-31T12:00:00Z

A file that can't be used changes nothing, and the log and ``/stats`` say why.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime

from lmcache.options import read_yaml, unknown_keys
from lmcache.tiers.remote.address import Endpoint, parse_endpoints
from lmcache.tiers.remote.tier import RemoteTier
from lmcache.tiers.remote.topology import ShardList
from lmcache_sidecar.config import ConfigError, read_text

logger = logging.getLogger(__name__)

_KEYS = "current", "previous", "until"
_MAX_SHARDS = 64
"""Each costs every key a hash."""


class ShardsFile:
    """Used by one thread at a time."""

    def __init__(self, path: str, tier: RemoteTier) -> None:
        self.problem = ""
        """Why the tier's list is not the file's; empty: it is."""
        self._path = path
        self._tier = tier
        self._seen: str | None = None

    def follow(self) -> None:
        """Have the tier use the list that is in the file now."""
        text, problem = None, ""
        try:
            text = read_text(self._path)
            if text == self._seen:
                return
            shards = read_shards(self._path, text)
            self._tier.set_shards(shards)
            logger.info("The shards of the remote tier are %s", self._tier.address)
        except (ConfigError, ValueError) as error:
            problem = str(error)
        self._seen = text
        if problem and problem != self.problem:
            logger.error("The shards of the remote tier stay %s: %s", self._tier.address, problem)
        self.problem = problem


def read_shards(path: str, text: str) -> ShardList:
    """Read a file's text. Raises ValueError, naming file and key."""
    keys = read_yaml(path, text)
    for sentence in unknown_keys(path, keys, _KEYS):
        logger.warning("%s", sentence)
    current, previous = _endpoints(path, keys, "current"), _endpoints(path, keys, "previous")
    if not current:
        raise ValueError(f"{path}: current: name a shard, as in 'current: [cache-0.cache:6379]'")
    return ShardList(current, previous, _until(path, keys) if previous else 0.0)


def _endpoints(path: str, keys: Mapping[str, object], name: str) -> tuple[Endpoint, ...]:
    texts = keys.get(name) or []
    if not isinstance(texts, list) or len(texts) > _MAX_SHARDS or not all(isinstance(t, str) for t in texts):
        raise ValueError(f"{path}: {name}: must be a list of up to {_MAX_SHARDS} shards, each host:port")
    try:
        return parse_endpoints(texts)
    except ValueError as error:
        raise ValueError(f"{path}: {name}: {error}") from None


def _until(path: str, keys: Mapping[str, object]) -> float:
    try:
        until = datetime.fromisoformat(str(keys.get("until")))
    except ValueError:
        until = datetime.min
    if until.tzinfo is None:
        raise ValueError(
            f"{path}: until: write up to when the previous shards are asked, as 2026-01-31T12:00:00Z"
        )
    return until.timestamp()
