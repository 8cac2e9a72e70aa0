"""The process: from its start to SIGTERM, whether a sidecar can run in it or not.

Where it is told to stay up, a sidecar that can't run is up and not ready: a container that ends again and
again would take its pod, and so a healthy engine, out of service.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import importlib
import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import lmcache
from lmcache.rpc import service
from lmcache_sidecar.config import Config, ConfigError, Reading
from lmcache_sidecar.http import HttpServer, Page
from lmcache_sidecar.sidecar import Sidecar
from lmcache_sidecar.stats import CallStats, Figure, Part, document, read

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0
_SLOW_SECONDS = 1.0
_END_SECONDS = 2.0
"""A stopping sidecar has these beyond its grace, to let go of everything."""


FIGURES: tuple[Figure[Daemon], ...] = (
    Figure("uptime_seconds", "Seconds since the start", lambda daemon: daemon.uptime_seconds),
    Figure(
        "is_ready",
        "1 if engines can attach; else /readyz says why",
        lambda daemon: not daemon.not_ready_reason,
    ),
)


async def serve(reading: Reading, read_again: Callable[[], Reading]) -> None:
    """Run until SIGTERM or SIGINT. Raises ConfigError when it can't run, unless it is to stay up."""
    daemon = Daemon(reading)
    # Not by the loop, which may hang.
    before = {number: signal.signal(number, daemon.end_soon) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        await daemon.run(read_again)
    finally:
        await daemon.stop()
        for number, handler in before.items():
            signal.signal(number, handler)
    logger.info("Stopped")


class Daemon:
    """The HTTP server, and behind it a sidecar as soon as one can run."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._loop = asyncio.get_running_loop()
        self._started = time.monotonic()
        self._stopping = asyncio.Event()
        self._calls = CallStats()
        self._sidecar: Sidecar | None = None
        self._reason = ""  # why there is none
        self._http: HttpServer | None = None
        self._http_address = ("", 0)  # as configured
        self._http_port = 0  # as it is

    def end_soon(self, *_: object) -> None:
        """Begin to stop; a signal handler. Whatever hangs then, the process ends."""
        seconds = self._reading.config.drain_grace_seconds + _END_SECONDS
        watchdog = threading.Timer(seconds, _end_now)
        watchdog.daemon = True
        watchdog.start()
        faulthandler.dump_traceback_later(seconds + 1, exit=True)  # needs neither the GIL nor the log's lock
        self._loop.call_soon_threadsafe(self._stopping.set)

    async def run(self, read_again: Callable[[], Reading]) -> None:
        """Start, as often as it takes, and wait for the end. Raises ConfigError unless it is to stay up."""
        for sentence in self._reading.warnings:
            logger.warning("%s", sentence)
        while not await self._try_to_start() and not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _RETRY_SECONDS)
            with contextlib.suppress(ConfigError):  # it is not to stay up any more: it did until now
                self._reading = read_again()
        await self._stopping.wait()
        logger.info("Stopping")

    async def stop(self) -> None:
        """Let go of everything."""
        if self._sidecar is not None:
            await self._sidecar.stop()
        if self._http is not None:
            await self._http.stop()

    # ---- starting ----

    async def _try_to_start(self) -> bool:
        config = self._reading.config
        try:
            await self._start_sidecar(self._reading.usable())
            await self._listen(config)
        except Exception as error:
            if not config.stay_up:
                raise
            await self._stay_up(config, error)
            return False
        self._reason = ""
        logger.info(
            "LMCache sidecar %s serves %s, arena %s of %d bytes, http port %d",
            lmcache.__version__, config.socket, config.arena_path, config.memory_size, self._http_port,
        )  # fmt: skip
        return True

    async def _start_sidecar(self, config: Config) -> None:
        if self._sidecar is None:
            opening = asyncio.create_task(asyncio.to_thread(Sidecar, config, self._calls))
            await asyncio.wait([opening], timeout=_SLOW_SECONDS)
            if not opening.done():  # probes are answered while a disk hangs
                self._reason = "starting: arena and disk take long to open"
                await self._listen(config)
                logger.warning("Not ready, http port %d, %s", self._http_port, self._reason)
            sidecar = await opening
            try:
                await sidecar.start()
            except BaseException:
                await sidecar.stop()
                raise
            self._sidecar = sidecar

    async def _listen(self, config: Config) -> None:
        """Serve the pages where the configuration says, and nowhere else."""
        address = config.http_host, config.http_port
        if self._http is not None:
            if self._http_address == address:
                return
            await self._http.stop()
        self._http, self._http_address = HttpServer(self._pages), address
        try:
            self._http_port = self._http.start(*address)
        except (OSError, UnicodeError) as error:
            self._http = None
            raise ConfigError(f"--http-port: can't listen on {address[0]}:{address[1]}: {error}") from error

    async def _stay_up(self, config: Config, error: Exception) -> None:
        """Say why there is no sidecar: once in the log, and over HTTP until there is one."""
        bug = None if isinstance(error, ConfigError) else error
        reason, known = repr(bug) if bug else str(error), self._reason
        self._reason = reason
        with contextlib.suppress(ConfigError):
            await self._listen(config)
        if _without_figures(reason) != _without_figures(known):
            logger.error(
                "The sidecar can't run, says so at http port %d, and tries again: %s",
                self._http_port, reason, exc_info=bug,
            )  # fmt: skip

    # ---- pages ----

    @property
    def _pages(self) -> dict[str, Callable[[str], Awaitable[Page]]]:
        return {
            "/metrics": self._metrics_page,
            "/stats": self._stats_page,
            "/samples": self._samples_page,
            "/healthz": self._healthz_page,
            "/readyz": self._readyz_page,
        }

    @property
    def not_ready_reason(self) -> str:
        """Why engines can't attach now; empty: they can."""
        return self._reason or (self._sidecar.not_ready_reason if self._sidecar else "starting, or stopping")

    @property
    def uptime_seconds(self) -> float:
        """Since the start."""
        return round(time.monotonic() - self._started, 3)

    def _stats(self) -> list[Part]:
        facts = {
            "version": lmcache.__version__,
            "protocol_version": service.PROTOCOL_VERSION,
            "pid": os.getpid(),
            "not_ready_reason": self.not_ready_reason,
        }
        return [Part("", facts, read(FIGURES, self)), *(self._sidecar.stats() if self._sidecar else ())]

    async def _metrics_page(self, _: str) -> Page:
        metrics = await asyncio.to_thread(importlib.import_module, "lmcache_sidecar.metrics")
        text = await metrics.render(self._calls, self._stats())
        return Page(HTTPStatus.OK, text, "text/plain; version=0.0.4; charset=utf-8")

    async def _stats_page(self, _: str) -> Page:
        text = json.dumps(document(self._stats()))
        return Page(HTTPStatus.OK, text.encode() + b"\n", "application/json")

    async def _samples_page(self, query: str) -> Page:
        if self._sidecar is None:
            return Page(HTTPStatus.SERVICE_UNAVAILABLE, f"{self.not_ready_reason}\n".encode())
        try:
            return Page(HTTPStatus.OK, await self._sidecar.samples.answer(query), "application/json")
        except ValueError as error:
            return Page(HTTPStatus.BAD_REQUEST, f"{error}\n".encode())

    async def _healthz_page(self, _: str) -> Page:
        return Page(HTTPStatus.OK, b"ok\n")  # that this runs is the proof

    async def _readyz_page(self, _: str) -> Page:
        if reason := self.not_ready_reason:
            return Page(HTTPStatus.SERVICE_UNAVAILABLE, f"{reason}\n".encode())
        return Page(HTTPStatus.OK, b"ready\n")


def _without_figures(reason: str) -> str:
    return re.sub(r"[0-9.]+", "", reason)  # as of free bytes, which change all the time


def _end_now() -> None:
    logger.warning("Something hangs, as a disk may, or a name that does not resolve: ending without it")
    os._exit(0)
