"""The engine's end of the wire: a sync, thread-safe, torch-free client of one sidecar.

::

    client = SidecarClient("/run/lmcache/kvcache.sock", hello)
    client.start()                      # returns at once; attaches, and re-attaches for ever, in the background
    session = client.session            # None while detached
    if session is not None:
        found = session.lookup("request-1", [(0, keys)])

Nothing here blocks longer than its deadline, and every failure is a ``SidecarError``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lmcache.tiers.base import Reservation, Slot

DEFAULT_TIMEOUT_SECONDS = 2.0


class Role(enum.Enum):
    """What a client does; the values are those of ``kvcache.proto``."""

    SCHEDULER = 1  # looks up and releases, maps nothing
    WORKER = 2  # one rank: reserves, copies, commits


@dataclass(frozen=True)
class KVGroup:
    """Layers whose KV lives and is dropped together."""

    group: int
    block_tokens: int
    chunk_bytes: int  # of one column
    window_tokens: int = 0  # 0: full attention, else a sliding window of so many tokens


@dataclass(frozen=True)
class ClientHello:
    """Who the client is; the same for all its sessions."""

    role: Role
    engine_uuid: bytes  # 16 bytes, the same in all processes of one engine instance
    namespace: bytes  # 32 bytes, see lmcache/keys.py
    chunk_tokens: int
    groups: tuple[KVGroup, ...]
    num_columns: int = 1  # ranks whose KV differs
    column: int = 0  # this rank's; 0 for the scheduler
    private_reason: str = ""  # not empty: keys mean nothing outside this engine process; memory tier only
    model: str = ""
    gpu_uuid: str = ""  # empty: the engine's KV is in host memory


class LookupResult(NamedTuple):
    """What ``Session.lookup`` found; the counts are leading chunks that every group has."""

    num_resident: int  # in memory
    num_leased: int  # in memory and under this request's lease: may be loaded
    num_pending: int  # after num_resident: lower tiers are bringing them, ask again
    probing: bool  # lower tiers have not said yet what they hold
    slots: dict[int, list[Slot]]  # group -> slots of its leased chunks, in order


class SidecarClient:
    """Keeps one client attached to a sidecar that may be absent, slow, frozen or restarted at any time.

    Forked children see a detached client. ``close`` runs at interpreter exit if it was not called before.
    """

    def __init__(
        self, socket_path: str, hello: ClientHello, *, on_change: Callable[[], None] | None = None
    ) -> None:
        """``on_change`` is called from the background thread after ``session`` became another; it must not block.

        Raises ValueError when ``socket_path`` is longer than the system takes.
        """
        raise NotImplementedError

    def start(self) -> None:
        """Start attaching in the background. Returns at once, whatever the sidecar does."""

    @property
    def session(self) -> Session | None:
        """The present session, or None while detached."""
        raise NotImplementedError

    @property
    def detached_reason(self) -> str:
        """One sentence why there is no session; empty while there is one."""
        raise NotImplementedError

    def close(self) -> None:
        """Detach, release the record lock and remove its file. Idempotent; waits at most 2 s."""


class Session:
    """One epoch: from one Attach to the end of its stream. All calls raise ``SidecarError`` and nothing else."""

    epoch: int
    slots: npt.NDArray[np.uint8] | None
    """``[num_rows, slot_bytes]``, this worker's column of the arena; None for the scheduler. Rows that the sidecar
    names in replies are ready; others must not be touched."""

    @property
    def is_over(self) -> bool:
        """True once the stream ended; every later call raises StaleSession."""
        raise NotImplementedError

    def lookup(
        self,
        request_id: str,
        group_keys: Sequence[tuple[int, bytes]],
        *,
        tenant: bytes = b"",
        prefill_tokens_per_second: float = 0.0,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> LookupResult:
        """Lease the leading chunks that are in memory; ``group_keys`` is (group, 32 bytes per chunk) per group.

        Repeating it with the same id extends the lease. Release the id in the end, also after an error: a call
        whose answer was lost may have leased.
        """
        raise NotImplementedError

    def reserve(
        self,
        group: int,
        keys: bytes,
        *,
        first_chunk: int = 0,
        tenant: bytes = b"",
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> list[Reservation]:
        """Ask for slots of this client's column, one answer per key (32 bytes each, head of the chain first)."""
        raise NotImplementedError

    def commit(self, slots: Sequence[Slot], timeout: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        """Say that the bytes of reserved slots are complete. All or none: refused if one of them is not held."""

    def abort(self, slots: Sequence[Slot], timeout: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        """Give reserved slots back. No copy into them may be under way."""

    def release(self, request_ids: Sequence[str], timeout: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        """End leases. Ids that could not be sent are remembered and sent after the next attach, so call it once."""

    def holds(self, slot: Slot) -> bool:
        """True if the slot is still what it was given as, straight from shared memory: check after a load's copy."""
        raise NotImplementedError

    def copying(self) -> AbstractContextManager[None]:
        """Hold this around every copy from or to the arena, including its commit or abort.

        Raises StaleSession when the session is over. Until all such blocks of older sessions are left, the sidecar
        keeps their slots in quarantine.
        """
        raise NotImplementedError
