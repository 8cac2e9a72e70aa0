"""The list of the remote tier's shards: a file that is followed while it changes.

.. code-block:: yaml

    current: [cache-0.cache:6379, cache-1.cache:6379, cache-2.cache:6379]
    previous: [cache-0.cache:6379, cache-1.cache:6379]
    until: 2026-01-31T12:00:00Z
    tls: [cache-2.cache:6379]
    ca: /etc/cache/ca.crt

``tls``: those that speak it though the URL says nothing of it; ``ca``: who may sign their certificates.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import datetime

from lmcache.options import read_yaml, unknown_keys
from lmcache.tiers.remote.address import Endpoint, parse_endpoints
from lmcache.tiers.remote.tier import RemoteTier
from lmcache.tiers.remote.topology import ShardList
from lmcache_sidecar.followed import FollowedFile

logger = logging.getLogger(__name__)

_KEYS = "current", "previous", "until", "tls", "ca"
_MAX_SHARDS = 64
"""Each costs every key a hash."""


class ShardsFile(FollowedFile):
    """See the module."""

    def __init__(self, path: str, tier: RemoteTier) -> None:
        super().__init__(path)
        self._tier = tier

    def use(self, text: str) -> None:
        """See ``FollowedFile``."""
        self._tier.set_shards(read_shards(self.path, text))

    @property
    def used(self) -> tuple[str, str]:
        """See ``FollowedFile``."""
        return "The list of the remote tier's shards", str(self._tier.address)


def read_shards(path: str, text: str) -> ShardList:
    """Read a file's text. Raises ValueError, naming file and key."""
    keys = read_yaml(path, text)
    for sentence in unknown_keys(path, keys, _KEYS):
        logger.warning("%s", sentence)
    current, previous = _endpoints(path, keys, "current"), _endpoints(path, keys, "previous")
    if not current:
        raise ValueError(f"{path}: current: name a shard, as in 'current: [cache-0.cache:6379]'")
    secure, ca = frozenset(_endpoints(path, keys, "tls")), keys.get("ca") or ""
    if not isinstance(ca, str):
        raise ValueError(f"{path}: ca: must be the name of a file")
    return ShardList(current, previous, _until(path, keys) if previous else 0.0, secure, ca)


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
