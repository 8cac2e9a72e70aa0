"""Assembles one sidecar from its arena, tiers, sessions and socket."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from lmcache_client.rpc import service
from lmcache_sidecar.calls import CallStats
from lmcache_sidecar.clients.registry import Clients
from lmcache_sidecar.config import Config, ConfigError
from lmcache_sidecar.copiers.copier import Mode, SidecarCopier
from lmcache_sidecar.explain.requests import page_of
from lmcache_sidecar.files.peers import hand_over, start_peer_server
from lmcache_sidecar.files.tenants import TenantsFile
from lmcache_sidecar.files.watched_files import SizeFile
from lmcache_sidecar.lower_tiers import open_tiers
from lmcache_sidecar.marks_exchange import MarksExchange
from lmcache_sidecar.pages import hints, stats
from lmcache_sidecar.pages.stats import StatsPart
from lmcache_sidecar.pages.tenant_stats import tenants_part
from lmcache_sidecar.peer_server.rows import TIER_NAME
from lmcache_sidecar.peer_server.server import PeerServer
from lmcache_sidecar.peer_server.service import PeerServerStats
from lmcache_sidecar.resizing import Resizer
from lmcache_sidecar.server import Server, claim_socket
from lmcache_sidecar.sessions import Sessions
from lmcache_store.tiers.budgets import Budget
from lmcache_store.tiers.errors import ArenaError
from lmcache_store.tiers.memory.arena import ArenaFile
from lmcache_store.tiers.memory.capacity import volume_bytes
from lmcache_store.tiers.memory.kernel_pages import reason_not_pinnable
from lmcache_store.tiers.remote.tier import RemoteTier
from lmcache_store.tiers.stats import MemoryStats
from lmcache_store.tiers.tiered.history import ChunkHistory
from lmcache_store.tiers.tiered.store import Admit, TieredStore
from lmcache_store.tiers.tiered.tasks import Tasks

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 30.0
_FOLLOW_SECONDS = 1.0
_RESIZE_SECONDS = 0.25
_END_RESERVE_SECONDS = 1.0
"""Part of the grace period in which no rows are handed over, because closing takes time, too."""
_CLOSE_SECONDS = 1.0
"""Time for tiers to close. A tier may hang in the kernel; the process then ends without it."""


class Sidecar:
    """The sidecar that engines attach to, between ``start`` and ``stop``."""

    def __init__(self, config: Config, calls: CallStats) -> None:
        """Take the socket path and the arena. Raises ConfigError, and then holds neither."""
        self._config = config
        claim_socket(config.socket)
        locks = _make_locks_directory(config.socket)
        # The arena's volume does not grow while this process runs. SizeFile refuses a size that exceeds the
        # volume. The tier then keeps the size of --memory-size.
        largest = min(config.memory_capacity, max(config.memory_size, volume_bytes(Path(config.arena_path))))
        self._size = SizeFile(config.memory_size_file, config.memory_size, largest)
        self._size.follow()
        plain = Budget(retain_percent=config.memory_retain_percent)
        self._tenants = TenantsFile(config.tenants_file, plain)
        self._tenants.follow()
        with ExitStack() as opened:
            self._arena = _open_arena(config, self._size.num_bytes)
            opened.callback(self._arena.close)
            self._handles = open_tiers(config, opened)
            self._opened = opened.pop_all()
        self._tiers = {name: lower.tier for name, lower in self._handles.items() if lower.tier}
        self._memory_stats = MemoryStats()  # not reset when the arena gets another format
        self._history = ChunkHistory()
        self._copier = SidecarCopier(Mode(config.transfer), self._arena)
        self.sessions = Sessions(
            self._arena,
            config.arena_path,
            Clients(locks),
            self._copier,
            self._make_store,
            config.memory_max_ttl_seconds,
        )
        """Sessions of the engines, with samples of their lookups and the causes of computed tokens."""
        self.sessions.on_namespace = self._note_namespace
        self._server = Server(self.sessions, config.socket, calls)
        self._copier.on_change = self._server.announce
        self._resizer = Resizer(self.sessions, self._copier, self._size, self._server.announce)
        self._tasks = Tasks()
        self._peer_server: PeerServer | None = None
        self.lost = asyncio.Event()
        """Set when another process changed the arena. The owner must then replace this object."""

    @property
    def not_ready_reason(self) -> str:
        """Reason why engines can't attach now; empty if they can."""
        if not self._server.is_listening:
            return "the sidecar does not listen: it is starting or stopping"
        problem = self._arena.problem
        return f"{problem}: the sidecar replaces it" if problem else ""

    async def start(self) -> None:
        """Start to listen. The arena populates its memory in the background.

        Raises ConfigError; the caller must call ``stop`` in that case, too.
        """
        loop = asyncio.get_running_loop()
        await self.sessions.start()
        await self._server.start()

        def grew() -> None:
            self._server.announce()
            self._copier.grow()

        self._arena.start(lambda: loop.call_soon_threadsafe(grew))
        peers = self._tiers.get(TIER_NAME)
        self._peer_server = start_peer_server(self._config, loop, lambda: self.sessions.store, peers)
        self._tasks.spawn(self.sessions.clients.monitor.run())
        self._tasks.spawn(self._keep_size())
        if self._config.tenants_file:
            self._tasks.spawn(self._keep_budgets())
        for handle in self._handles.values():
            if handle.servers_file is not None:
                self._tasks.spawn(_repeat(_FOLLOW_SECONDS, handle.servers_file.follow))
            if handle.keys is not None:
                self._tasks.spawn(_repeat(_FOLLOW_SECONDS, handle.keys.follow))
            if handle.tier is not None:
                self._tasks.spawn(_repeat(_CHECK_SECONDS, handle.tier.check))
            if isinstance(handle.tier, RemoteTier):
                self._tasks.spawn(MarksExchange(self.sessions.marks, handle.tier).run())

    async def stop(self) -> None:
        """Refuse new calls, write queued rows through, and release all resources except the arena's file.

        If another process changed the arena, the rows are lost, and nothing is written."""
        if self._peer_server is not None:
            self._peer_server.refuse_offers()
        await self._server.stop()
        await self._copier.close()
        await self._tasks.cancel()
        if (store := self.sessions.store) is not None and not self._arena.problem:
            await self._drain(store)
        if self._peer_server is not None:
            await asyncio.to_thread(self._peer_server.close)
        if store is not None:
            await store.close(_CLOSE_SECONDS)
        await asyncio.to_thread(self._opened.close)

    async def _drain(self, store: TieredStore) -> None:
        """Write queued rows through, then hand rows over to other pods. Both share the grace period."""
        seconds, began = self._config.drain_grace_seconds, time.monotonic()
        if not await store.drain(seconds):
            logger.warning("%d rows were not written through within the grace period", store.num_unwritten)
        left = began + seconds - _END_RESERVE_SECONDS - time.monotonic()
        if self._peer_server is not None and left > 0:
            await hand_over(store, self._tiers.get(TIER_NAME), self._config.peer_name, left)

    async def requests(self, query: str) -> bytes:
        """Return the page of recent requests. Raises ValueError for a bad query."""
        causes = self.sessions.causes
        causes.settle()
        return page_of(reversed(causes.requests), query)

    async def hints(self, query: str) -> bytes:
        """Return the page of hints in effect. Raises ValueError for a query."""
        return hints.page_of(self.sessions.hints.retained(), query)

    def stats(self) -> list[StatsPart]:
        """Statistics of all components of this sidecar."""
        parts = stats.collect(self.sessions, self._handles, self._memory_stats, self._resizer)
        memory = self.sessions.store.memory if self.sessions.store is not None else None
        causes, disk = self.sessions.causes.by_tenant, self._tiers.get("disk")
        parts.append(tenants_part(self._tenants, self._memory_stats, causes, memory, disk))
        parts.append(hints.hints_part(self.sessions.hints))
        if (server := self._peer_server) is not None:
            figures = stats.read(stats.declared(PeerServerStats), server.service.stats)
            parts.append(StatsPart("peer_server", {}, figures, "lmcache_peer_server"))
        return parts

    async def _keep_size(self) -> None:
        """Resize the memory tier, step by step, whenever its size file changes, until the arena is lost.

        The lock ``forming`` excludes changes of the arena's format during a step.
        """
        while not self._arena.problem:
            try:
                await asyncio.to_thread(self._size.follow)
                held = stats.held_bytes(self._arena, self._handles)
                self.sessions.causes.benefit.hold(held, time.monotonic())
                has_more = True
                while has_more:
                    async with self.sessions.forming:
                        has_more = self._resizer.step()
                    await asyncio.sleep(0)
            except Exception as error:
                self._resizer.note_bug(error)
            await asyncio.sleep(_RESIZE_SECONDS)
        self.lost.set()

    async def _keep_budgets(self) -> None:
        """Follow the tenants file."""
        while True:
            await asyncio.to_thread(self._tenants.follow)
            self._apply_budgets()
            await asyncio.sleep(_FOLLOW_SECONDS)

    def _note_namespace(self, namespace: bytes) -> None:
        for client in self.sessions.clients.by_uuid.values():  # these namespaces must not be forgotten
            self._tenants.add_namespace(client.peer.hello.namespace)
        if self._tenants.add_namespace(namespace):
            self._apply_budgets()

    def _apply_budgets(self) -> None:
        self._tenants.resolve()
        if (store := self.sessions.store) is not None:
            store.memory.set_budgets(self._tenants.budgets)

    def _make_store(self) -> TieredStore:
        return TieredStore(
            self._arena,
            self._tiers,
            admit=Admit(self._config.admit),
            stats={name: lower.traffic for name, lower in self._handles.items()},
            memory_stats=self._memory_stats,
            history=self._history,
            budgets=self._tenants.budgets,
        )


async def _repeat(seconds: float, action: Callable[[], None]) -> None:
    """Run an action in a thread, again and again, with a pause of ``seconds`` in between."""
    while True:
        await asyncio.to_thread(action)
        await asyncio.sleep(seconds)


def _make_locks_directory(socket_path: str) -> Path:
    path = service.locks_directory(socket_path)
    try:
        path.mkdir(exist_ok=True)
        path.chmod(0o2770)  # clients of the same group create files here
    except OSError as error:
        raise ConfigError(f"--socket: can't create {path} for lock files: {error.strerror}") from error
    return path


def _open_arena(config: Config, num_bytes: int) -> ArenaFile:
    directory = os.path.dirname(config.arena_path) or "."
    if not os.path.isdir(directory):
        raise ConfigError(f"--arena: {directory} is not a directory: create it, or mount a volume there")
    if problem := service.directory_problem(directory):
        raise ConfigError(f"--arena: {problem}")
    reason = reason_not_pinnable(Path(config.arena_path))
    if reason and Mode(config.transfer) is Mode.CUDA_IPC:
        raise ConfigError(f"--arena: {reason}")
    try:
        return ArenaFile(
            config.arena_path,
            config.memory_capacity,
            target_bytes=num_bytes,
            huge_pages=config.huge_pages,
            numa_node=config.numa_node,
        )
    except ArenaError as error:
        raise ConfigError(f"--arena: {error}") from error
