"""Opens the lower tiers that the configuration enables: disk, peers and remote."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmcache_sidecar.config import Config, ConfigError
from lmcache_sidecar.files.peers import PeersFile, passwords_of
from lmcache_sidecar.files.shards import ShardsFile
from lmcache_sidecar.files.watched_files import FollowedFile
from lmcache_sidecar.peer_server.rows import TIER_NAME
from lmcache_store.tiers.base import LowerTier
from lmcache_store.tiers.disk.tier import DiskTier
from lmcache_store.tiers.errors import NoKeyError, TierError
from lmcache_store.tiers.peers.tier import PeersTier
from lmcache_store.tiers.remote.address import DEFAULT_PREFIX, Address
from lmcache_store.tiers.remote.tier import RemoteTier
from lmcache_store.tiers.stats import TieredStats

if TYPE_CHECKING:
    from lmcache_sidecar.files.encryption_keys import KeysDirectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TierHandle:
    """One enabled lower tier; ``off_reason`` says why ``tier`` is None."""

    address: str
    """Address for people, without secrets."""

    tier: LowerTier | None
    off_reason: str = ""
    servers_file: FollowedFile | None = None
    """File with the list of the tier's servers, to follow; None: the configuration names them."""
    keys: KeysDirectory | None = None
    """Encryption keys of the tier, to follow; None: its rows are not encrypted."""
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

    delay_seconds = config.remote_encryption_delay_seconds
    keys = _open_keys(
        config.remote_encryption_keys_dir, "--remote-encryption-keys-dir", "remote", delay_seconds
    )
    cipher = keys.cipher if keys is not None else None

    def current_address() -> Address:
        """Read the credentials for each new connection: mounted secrets rotate while the sidecar runs.

        Without an encryption key there is no connection, so no row is written."""
        try:
            if cipher is not None:
                cipher.check()
            return config.with_credentials(address)
        except (ConfigError, NoKeyError) as error:
            raise ConnectionError(str(error)) from error

    # A wrong path fails the start. In a pod, the secret may not exist yet, or be newer than the pod.
    # The other tiers work without it.
    if not config.stay_up:
        config.with_credentials(address)
    remote = RemoteTier(
        address, timeout_seconds=config.remote_timeout_seconds, present=current_address, cipher=cipher
    )
    shards = ShardsFile(config.remote_shards_file, remote) if config.remote_shards_file else None
    if shards is not None:
        shards.follow()  # so that the first request asks the right shards
    return TierHandle(str(address), remote, servers_file=shards, keys=keys)


def _open_peers(config: Config) -> TierHandle | None:
    if not config.peers_file:
        return None
    passwords = passwords_of(config)
    peers = PeersTier(
        prefix=DEFAULT_PREFIX,
        password=(lambda: passwords()[0]) if passwords is not None else str,
        tls=config.peer_tls,
        timeout_seconds=config.remote_timeout_seconds,
        ask_seconds=config.peer_answer_seconds,
    )
    file = PeersFile(config.peers_file, config.peer_name, peers, of_part=config.peers_of_part)
    file.follow()
    return TierHandle(config.peers_file, peers, servers_file=file)


def _open_disk(config: Config) -> TierHandle | None:
    """Open the disk tier. If that fails, the sidecar works without it."""
    if not config.disk_path:
        return None
    keys = _open_keys(config.disk_encryption_keys_dir, "--disk-encryption-keys-dir", "disk", 0.0)
    cipher = keys.cipher if keys is not None else None
    try:
        disk = DiskTier(config.disk_path, config.disk_size, cipher)
        return TierHandle(config.disk_path, disk, keys=keys)
    except TierError as error:
        logger.error("The disk tier is off: --disk-path: %s", error)
        return TierHandle(config.disk_path, None, str(error), keys=keys)


def _open_keys(path: str, option: str, tier: str, delay_seconds: float) -> KeysDirectory | None:
    """Read the encryption keys of a tier, if it has any.

    Without a readable key, the tier stays off until there is one. The log and ``/stats`` give the reason.
    Raises ConfigError if the package ``cryptography`` is missing.
    """
    if not path:
        return None
    # Importing cryptography takes time that a sidecar without encryption need not spend.
    try:
        from lmcache_sidecar.files.encryption_keys import KeysDirectory
    except ImportError as error:
        raise ConfigError(f"{option} needs the package cryptography, install it: {error}") from error

    keys = KeysDirectory(path, option, tier, delay_seconds)
    keys.follow()
    return keys


TIERS: dict[str, Callable[[Config], TierHandle | None]] = {
    "disk": _open_disk,
    TIER_NAME: _open_peers,
    "remote": _open_remote,
}
"""Functions that open each lower tier, in lookup order; they return None for a tier that is not enabled."""
