"""The process of a sidecar, from its start to SIGTERM.

With ``stay_up``, a sidecar that cannot use its configuration stays up and is not ready, because a container
that ends again and again would take its pod, and so a healthy engine, out of service.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
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

import lmcache_store
from lmcache_client.rpc import service
from lmcache_sidecar.calls import CallStats
from lmcache_sidecar.config import Config, ConfigError, ConfigReading
from lmcache_sidecar.pages.http import HttpServer, Page
from lmcache_sidecar.pages.stats import Figure, StatsPart, document, read
from lmcache_sidecar.pages.tokens import PageTokens
from lmcache_sidecar.sidecar import Sidecar

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0
_SLOW_SECONDS = 1.0
_FOLLOW_SECONDS = 1.0
_OPEN_PAGES = "/healthz", "/readyz"
"""Pages that never need a token, because the kubelet sends none. They show no data."""
_END_SECONDS = 2.0
"""Time that a stopping sidecar has after its grace period, to release its resources."""

FIGURES: tuple[Figure[Daemon], ...] = (
    Figure("uptime_seconds", "Seconds since the start or a lost arena", lambda daemon: daemon.uptime_seconds),
    Figure(
        "is_ready",
        "1 if engines can attach; otherwise /readyz gives the reason",
        lambda daemon: not daemon.not_ready_reason,
    ),
    Figure(
        "arenas_lost",
        "Arenas that the sidecar replaced, without their rows, because another process changed their file",
        lambda daemon: daemon.num_lost_arenas,
        is_counter=True,
    ),
    Figure("build_info", "1; the label has the version", lambda _: {lmcache_store.__version__: 1}, "version"),
)


async def serve(reading: ConfigReading, read_again: Callable[[], ConfigReading]) -> None:
    """Run until SIGTERM or SIGINT. Raises ConfigError if the sidecar can't run, unless it must stay up."""
    daemon = Daemon(reading)
    # Signal handlers of the loop would not run while the loop hangs.
    before = {number: signal.signal(number, daemon.end_soon) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        await daemon.run(read_again)
    finally:
        await daemon.stop()
        for number, handler in before.items():
            signal.signal(number, handler)
    logger.info("Stopped")


class Daemon:
    """The HTTP server, and the sidecar as soon as it can run."""

    def __init__(self, reading: ConfigReading) -> None:
        self._reading = reading
        self._loop = asyncio.get_running_loop()
        self._started = time.monotonic()
        self._stopping = asyncio.Event()
        self._calls = CallStats()
        self._sidecar: Sidecar | None = None
        self._reason = ""  # why no sidecar runs
        self._http: HttpServer | None = None
        self._http_address = ("", 0)  # as configured
        self._http_port = 0  # the port in use
        self._tokens = PageTokens("")
        self._following: asyncio.Task[None] | None = None
        self.num_lost_arenas: int = 0
        """Arenas that were replaced because another process changed their file."""

    def end_soon(self, *_: object) -> None:
        """Begin to stop (a signal handler). A watchdog ends the process if something hangs."""
        seconds = self._reading.config.drain_grace_seconds + _END_SECONDS
        watchdog = threading.Timer(seconds, _end_now)
        watchdog.daemon = True
        watchdog.start()
        faulthandler.dump_traceback_later(seconds + 1, exit=True)  # needs neither the GIL nor the log's lock
        self._loop.call_soon_threadsafe(self._stopping.set)

    async def run(self, read_again: Callable[[], ConfigReading]) -> None:
        """Start the sidecar, with retries, and wait for the end. Raises ConfigError without stay_up."""
        for sentence in self._reading.warnings:
            logger.warning("%s", sentence)
        while not self._stopping.is_set():
            if await self._try_to_start():
                await self._until_lost()
                continue
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _RETRY_SECONDS)
            with contextlib.suppress(ConfigError):  # it may lack stay_up now: keep running
                self._reading = read_again()
        logger.info("Stopping")

    async def stop(self) -> None:
        """Stop the sidecar and the HTTP server."""
        if self._sidecar is not None:
            await self._sidecar.stop()
        if self._http is not None:
            await self._http.stop()
        if self._following is not None:
            self._following.cancel()

    async def _until_lost(self) -> None:
        """Wait for the end, or until another process has changed the arena. Then end the sidecar."""
        assert self._sidecar is not None, "it has just started"
        events = [asyncio.create_task(event.wait()) for event in (self._stopping, self._sidecar.lost)]
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        for event in events:
            event.cancel()
        if not self._stopping.is_set():
            sidecar, self._sidecar, self._reason = self._sidecar, None, self.not_ready_reason
            self.num_lost_arenas += 1
            self._started = time.monotonic()
            logger.error("Engines attach again, and all rows in memory are lost: %s", self._reason)
            await sidecar.stop()
            del sidecar
            gc.collect()  # cycles keep the lost file mapped, and its successor needs the memory

    # ---- starting ----

    async def _try_to_start(self) -> bool:
        config = self._reading.config
        try:
            await self._start_sidecar(self._reading.usable())
            await self._listen(config)
        except Exception as error:
            if not config.stay_up and not self.num_lost_arenas:
                raise  # otherwise a sidecar that served engines tries again: they may still map a lost arena
            await self._stay_up(config, error)
            return False
        self._reason = ""
        logger.info(
            "LMCache sidecar %s serves %s: arena %s of %d bytes, http port %d",
            lmcache_store.__version__, config.socket, config.arena_path, config.memory_size, self._http_port,
        )  # fmt: skip
        return True

    async def _start_sidecar(self, config: Config) -> None:
        if self._sidecar is None:
            opening = asyncio.create_task(asyncio.to_thread(Sidecar, config, self._calls))
            await asyncio.wait([opening], timeout=_SLOW_SECONDS)
            if not opening.done():  # the HTTP server must answer probes while a disk hangs
                self._reason = "starting: opening the arena and the disk tier takes long"
                await self._listen(config)
                logger.warning("Not ready (http port %d): %s", self._http_port, self._reason)
            sidecar = await opening
            try:
                await sidecar.start()
            except BaseException:
                await sidecar.stop()
                raise
            self._sidecar = sidecar

    async def _listen(self, config: Config) -> None:
        """Serve the pages on the configured address; moves there if it has changed."""
        if self._tokens.path != config.http_tokens_dir:
            self._tokens = PageTokens(config.http_tokens_dir)
            self._tokens.follow()  # now: a first request with a valid token must not be refused
        if self._following is None:
            self._following = asyncio.create_task(self._follow_tokens())
        address = config.http_host, config.http_port
        if self._http is not None:
            if self._http_address == address:
                return
            await self._http.stop()
        self._http = HttpServer(self._pages, self._guard)
        self._http_address = address
        try:
            self._http_port = self._http.start(*address)
        except (OSError, UnicodeError) as error:
            self._http = None
            raise ConfigError(f"--http-port: can't listen on {address[0]}:{address[1]}: {error}") from error

    async def _stay_up(self, config: Config, error: Exception) -> None:
        """Report why no sidecar runs: once in the log, and over HTTP until it runs."""
        bug = None if isinstance(error, ConfigError) else error
        reason, last_reason = repr(bug) if bug else str(error), self._reason
        self._reason = reason
        with contextlib.suppress(ConfigError):
            await self._listen(config)
        if _without_digits(reason) != _without_digits(last_reason):
            logger.error(
                "The sidecar can't run and tries again; http port %d serves the reason at /readyz: %s",
                self._http_port, reason, exc_info=bug,
            )  # fmt: skip

    # ---- pages ----

    @property
    def _pages(self) -> dict[str, Callable[[str], Awaitable[Page]]]:
        return {
            "/metrics": self._metrics_page,
            "/stats": self._stats_page,
            "/samples": self._page(lambda sidecar, query: sidecar.sessions.samples.answer(query)),
            "/requests": self._page(Sidecar.requests),
            "/hints": self._page(Sidecar.hints),
            "/healthz": self._healthz_page,
            "/readyz": self._readyz_page,
        }

    def _guard(self, path: str, token: str) -> Page | None:
        """Return the answer to another machine that may not read the page; None if it may."""
        return None if path in _OPEN_PAGES else self._tokens.refusal(token)

    async def _follow_tokens(self) -> None:
        while True:
            try:
                if self._tokens.path:
                    await asyncio.to_thread(self._tokens.follow)
            except Exception:  # for example no thread: former tokens must not stay valid for good
                logger.exception("The tokens for pages were not read again")
            await asyncio.sleep(_FOLLOW_SECONDS)

    @property
    def not_ready_reason(self) -> str:
        """Reason why engines can't attach now; empty if they can."""
        return self._reason or (self._sidecar.not_ready_reason if self._sidecar else "starting or stopping")

    @property
    def uptime_seconds(self) -> float:
        """Seconds since the start, or since the arena was replaced, when most counters begin again."""
        return round(time.monotonic() - self._started, 3)

    def _stats(self) -> list[StatsPart]:
        facts = {
            "version": lmcache_store.__version__,
            "protocol_version": service.PROTOCOL_VERSION,
            "pid": os.getpid(),
            "time": round(time.time(), 3),
            "not_ready_reason": self.not_ready_reason,
            "http_authentication": "Token" if self._tokens.path else "None",
            "http_authentication_problem": self._tokens.problem,
        }
        return [StatsPart("", facts, read(FIGURES, self)), *(self._sidecar.stats() if self._sidecar else ())]

    async def _metrics_page(self, _: str) -> Page:
        metrics = await asyncio.to_thread(importlib.import_module, "lmcache_sidecar.pages.metrics")
        times = self._sidecar.sessions.causes.times if self._sidecar else None
        text = await metrics.render(self._calls, self._stats(), times)
        return Page(HTTPStatus.OK, text, "text/plain; version=0.0.4; charset=utf-8")

    async def _stats_page(self, _: str) -> Page:
        text = json.dumps(document(self._stats()))
        return Page(HTTPStatus.OK, text.encode() + b"\n", "application/json")

    def _page(self, ask: Callable[[Sidecar, str], Awaitable[bytes]]) -> Callable[[str], Awaitable[Page]]:
        """Return a page with the answer to a query. ``ask`` raises ValueError if the query is invalid."""

        async def answer(query: str) -> Page:
            if self._sidecar is None:
                return Page(HTTPStatus.SERVICE_UNAVAILABLE, f"{self.not_ready_reason}\n".encode())
            try:
                return Page(HTTPStatus.OK, await ask(self._sidecar, query), "application/json")
            except ValueError as error:
                return Page(HTTPStatus.BAD_REQUEST, f"{error}\n".encode())

        return answer

    async def _healthz_page(self, _: str) -> Page:
        return Page(HTTPStatus.OK, b"ok\n")  # this answer proves that the loop runs

    async def _readyz_page(self, _: str) -> Page:
        if reason := self.not_ready_reason:
            return Page(HTTPStatus.SERVICE_UNAVAILABLE, f"{reason}\n".encode())
        return Page(HTTPStatus.OK, b"ready\n")


def _without_digits(reason: str) -> str:
    return re.sub(r"[0-9.]+", "", reason)  # free bytes and the like change all the time


def _end_now() -> None:
    logger.warning("The sidecar did not stop in time: a disk or a name lookup may hang. Ending the process")
    os._exit(0)
