"""Who a client is: what it tells the sidecar first. Pure; ``attachment`` puts it on the wire."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lmcache.kv_groups import KVGroup


class Role(enum.Enum):
    """What a client does; the values are those of ``kvcache.proto``."""

    SCHEDULER = 1  # looks up and releases, maps nothing
    WORKER = 2  # one rank: reserves, copies, commits


@dataclass(frozen=True)
class ClientHello:
    """Who the client is; the same for all its sessions."""

    role: Role
    engine_uuid: bytes
    """16 bytes, the same in all processes of one engine instance."""
    namespace: bytes
    """32 bytes, see lmcache/keys.py."""
    chunk_tokens: int
    groups: tuple[KVGroup, ...]
    num_columns: int = 1
    """Ranks whose KV differs."""
    column: int = 0
    """This rank's; 0 for the scheduler."""
    private_reason: str = ""
    """Not empty: keys mean nothing outside this engine process; memory tier only."""
    model: str = ""
    gpu_uuid: str = ""
    """Empty: the engine's KV is in host memory."""
