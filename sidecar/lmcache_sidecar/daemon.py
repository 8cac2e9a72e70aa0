"""The parts of the sidecar put together, from start to SIGTERM."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import signal
import time
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

import lmcache
from lmcache.rpc import service
from lmcache.tiers.arena import ArenaFile
from lmcache.tiers.base import ArenaError
from lmcache.tiers.remote import RemoteTier
from lmcache.tiers.tiered import Admit, TieredStore
from lmcache_sidecar import stats
from lmcache_sidecar.calls import CallCounts
from lmcache_sidecar.config import Config, ConfigError
from lmcache_sidecar.pages import Page
from lmcache_sidecar.server import Server, claim_socket
from lmcache_sidecar.sessions import Sessions
from lmcache_sidecar.tiers import open_tiers

if TYPE_CHECKING:
    from lmcache_sidecar.http import HttpServer

logger = logging.getLogger(__name__)


async def serve(config: Config) -> None:
    """Run until SIGTERM or SIGINT. Raises ConfigError when it can't start."""
    sidecar = Sidecar(config)
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    try:
        await sidecar.start()
        await stopping.wait()
        logger.info("Stopping")
    finally:
        await sidecar.stop()


class Sidecar:
    """One daemon: arena, sessions, gRPC and HTTP servers."""

    def __init__(self, config: Config) -> None:
        """Take the socket and the arena. Raises ConfigError."""
        self._config = config
        claim_socket(config.socket)
        locks = _make_locks_directory(config.socket)
        self._arena = _open_arena(config)
        self._configured = open_tiers(config)
        self._tiers = {name: lower.tier for name, lower in self._configured.items() if lower.tier}
        self._sessions = Sessions(self._arena, config.arena_path, locks, self._make_store)
        self._started = time.monotonic()
        self._calls = CallCounts()
        self._server = Server(self._sessions, config.socket, self._calls)
        self._pages = {
            "/metrics": self._metrics_page,
            "/stats": self._stats_page,
            "/healthz": self._healthz_page,
            "/readyz": self._readyz_page,
        }
        self._http: HttpServer | None = None
        self._deaths: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen; populating goes on in the background. Raises ConfigError."""
        config, loop = self._config, asyncio.get_running_loop()
        try:
            await self._sessions.start()
        except OSError as error:
            raise ConfigError(f"--socket: a client's lock file can't be opened: {error}") from error
        await self._server.start()

        def on_growth() -> None:
            loop.call_soon_threadsafe(self._server.arena_grew)

        self._arena.start(on_growth)
        self._deaths = asyncio.create_task(self._sessions.deaths.run())
        if isinstance(remote := self._tiers.get("remote"), RemoteTier):
            loop.run_in_executor(None, remote.check)  # a wrong URL shows in the log before an engine comes
        try:
            http = await asyncio.to_thread(importlib.import_module, "lmcache_sidecar.http")
            self._http = http.HttpServer(self._pages)
            port = await self._http.start(config.http_host, config.http_port)
        except OSError as error:
            raise ConfigError(
                f"--http-port: can't listen on {config.http_host}:{config.http_port}: {error}"
            ) from error
        logger.info(
            "LMCache sidecar %s serves %s, arena %s of %d bytes, http port %d",
            lmcache.__version__, config.socket, config.arena_path, config.memory_size, port,
        )  # fmt: skip

    async def stop(self) -> None:
        """Take no more calls, write through what is queued, let go of everything. The arena's file stays."""
        await self._server.stop()
        if self._deaths is not None:
            self._deaths.cancel()
        if (store := self._sessions.store) is not None:
            if not await store.drain(self._config.drain_grace_seconds):
                logger.warning(
                    "%d rows were not written through within the grace period", store.num_unsettled
                )
            await store.close()
        for tier in self._tiers.values():
            await asyncio.to_thread(tier.close)
        if self._http is not None:
            await self._http.stop()
        self._arena.close()
        logger.info("Stopped")

    def _make_store(self) -> TieredStore:
        return TieredStore(self._arena, self._tiers, admit=Admit(self._config.admit))

    def _stats(self) -> dict[str, object]:
        return stats.collect(self._sessions, self._configured, time.monotonic() - self._started)

    async def _metrics_page(self) -> Page:
        metrics = await asyncio.to_thread(importlib.import_module, "lmcache_sidecar.metrics")
        text = await metrics.render(self._calls, self._stats())
        return Page(HTTPStatus.OK, text, "text/plain; version=0.0.4; charset=utf-8")

    async def _stats_page(self) -> Page:
        return Page(HTTPStatus.OK, json.dumps(self._stats()).encode() + b"\n", "application/json")

    async def _healthz_page(self) -> Page:
        return Page(HTTPStatus.OK, b"ok\n")  # that this runs is the proof

    async def _readyz_page(self) -> Page:
        if self._server.is_listening and self._arena.path.exists():
            return Page(HTTPStatus.OK, b"ready\n")
        return Page(HTTPStatus.SERVICE_UNAVAILABLE, b"not listening, or the arena's file is gone\n")


def _make_locks_directory(socket_path: str) -> Path:
    path = service.locks_directory(socket_path)
    try:
        path.mkdir(exist_ok=True)
        path.chmod(0o2770)  # clients of the same group make their files here
    except OSError as error:
        raise ConfigError(
            f"--socket: can't make {path} for the clients' lock files: {error.strerror}"
        ) from error
    return path


def _open_arena(config: Config) -> ArenaFile:
    directory = os.path.dirname(config.arena_path) or "."
    if not os.path.isdir(directory):
        raise ConfigError(f"--arena: {directory} is not a directory: make it, or mount a volume there")
    try:
        return ArenaFile(
            config.arena_path,
            config.memory_size,
            huge_pages=config.huge_pages,
            numa_node=config.numa_node,
        )
    except ArenaError as error:
        raise ConfigError(f"--arena: {error}") from error
