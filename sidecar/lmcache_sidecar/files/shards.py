"""The list of the remote tier's shards, in a file that the sidecar re-reads while it runs.

.. code-block:: yaml

    current: [cache-0.cache:6379, cache-1.cache:6379, cache-2.cache:6379]
    previous: [cache-0.cache:6379, cache-1.cache:6379]
    until: 2026-01-31T12:00:00Z
    tls: [cache-2.cache:6379]
    ca: /etc/cache/ca.crt

``until`` is the time up to which the sidecar also asks the previous shards. ``tls`` lists shards that use TLS
although the URL says ``redis://``. ``ca`` is a file with the certificate authorities that these shards use.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime

from lmcache_sidecar.files.watched_files import FollowedFile
from lmcache_store.common.options import read_yaml, unknown_keys
from lmcache_store.tiers.remote.address import Endpoint, parse_endpoints
from lmcache_store.tiers.remote.tier import RemoteTier
from lmcache_store.tiers.remote.topology import ShardList

logger = logging.getLogger(__name__)

_KEYS = "current", "previous", "until", "tls", "ca"
_MAX_SHARDS = 64
"""Limit of each list: every key is hashed once per shard."""


class ShardsFile(FollowedFile):
    """The shards file of one remote tier; see the module's description."""

    def __init__(self, path: str, tier: RemoteTier) -> None:
        super().__init__(path)
        self._tier = tier

    def use(self, content: str) -> None:
        """Give the list to the remote tier. Raises ValueError, naming file and key."""
        self._tier.set_shards(read_shards(self.path, content))

    @property
    def used(self) -> tuple[str, str]:
        """Subject and present value, for the log."""
        return "The list of the remote tier's shards", str(self._tier.address)


def read_shards(path: str, text: str) -> ShardList:
    """Parse the text of a shards file. Raises ValueError, naming file and key."""
    keys = read_yaml(path, text)
    warn_of_unknown(path, keys, _KEYS)
    current, previous = endpoints_of(path, keys, "current"), endpoints_of(path, keys, "previous")
    if not current:
        raise ValueError(f"{path}: current: name at least one shard, such as 'current: [cache-0.cache:6379]'")
    secure, ca = frozenset(endpoints_of(path, keys, "tls")), keys.get("ca") or ""
    if not isinstance(ca, str):
        raise ValueError(f"{path}: ca: must be the path of a file")
    return ShardList(current, previous, _until(path, keys) if previous else 0.0, secure, ca)


def warn_of_unknown(path: str, keys: Mapping[str, object], known: Sequence[str]) -> None:
    """Log the keys of a file that are not known."""
    for sentence in unknown_keys(path, keys, known):
        logger.warning("%s", sentence)


def endpoints_of(
    path: str, keys: Mapping[str, object], name: str, limit: int = _MAX_SHARDS
) -> tuple[Endpoint, ...]:
    """Return the list of servers under a key of a file. Raises ValueError, naming both."""
    texts = keys.get(name) or []
    if not isinstance(texts, list) or len(texts) > limit or not all(isinstance(t, str) for t in texts):
        raise ValueError(f"{path}: {name}: must be a list of up to {limit} servers, each host:port")
    try:
        return parse_endpoints(texts)
    except ValueError as error:
        raise ValueError(f"{path}: {name}: {error}") from None


def _until(path: str, keys: Mapping[str, object]) -> float:
    text = keys.get("until")
    try:
        # A list is not converted to text: one that repeats others by YAML's aliases would fill the memory.
        until = datetime.fromisoformat(text) if isinstance(text, str) else datetime.min
    except ValueError:
        until = datetime.min
    if until.tzinfo is None:
        raise ValueError(f"{path}: until: write a time with its time zone, such as 2026-01-31T12:00:00Z")
    return until.timestamp()
