"""vLLM's router: its packages in a folder of the cache directory, its process, and pods that it can follow.

The router has an environment of its own, the one of its image. Its packages are pinned in
``router/requirements.txt``.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from testing.child_process import REPOSITORY, answers, free_ports, wait_until
from testing.engine.process import ServedEngine, patient_config
from testing.packages import installed
from testing.processes import Server, SidecarProcess

MIDDLEWARE = "lmcache_client.vllm.router_discovery.RouterDiscovery"
REQUIREMENTS = REPOSITORY / "router" / "requirements.txt"
_SEQUENCE = re.compile(r"live sequence advanced source=(\S+) rank=(\d+) seq=(\d+)")
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


@functools.cache
def package() -> Path:
    """Return the folder to put first in ``PYTHONPATH``. Installs the router if it is missing.

    Raises InstallationError.
    """
    problem = "vLLM's router cannot be installed. Check the access to the package index."
    return installed("router", REQUIREMENTS, "vLLM's router (40 MB, some seconds)", problem, _say)


class RouterProcess(Server):
    """``with RouterProcess(urls) as router:`` starts vLLM's router in front of engines at these URLs.

    ``arguments`` are further arguments of the router, and ``variables`` further environment variables.
    """

    def __init__(self, worker_urls: Sequence[str], *arguments: str, **variables: str) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="lmc-router-")))
        self._worker_urls = worker_urls
        self._arguments = arguments
        self._variables = variables
        self.url = ""
        self.port = self.metrics_port = 0

    def start(self, *, timeout: float = 60.0) -> None:
        """Start the router, and wait until it has found all engines healthy."""
        self.port, self.metrics_port = free_ports(2)
        self.url = f"http://127.0.0.1:{self.port}"
        workers = ("--worker-urls", *self._worker_urls) if self._worker_urls else ()
        self.spawn(
            [
                *(sys.executable, "-m", "vllm_router.launch_router", *workers, "--host", "127.0.0.1"),
                *(*self._arguments, "--port", str(self.port), "--prometheus-port", str(self.metrics_port)),
                *("--worker-startup-check-interval", "1", "--log-level", "debug"),
            ],
            env={**os.environ, "PYTHONPATH": str(package()), **self._variables},
        )
        try:
            wait_until(self._is_healthy, timeout=timeout, what="the router finds the engines")
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{self.log[-4000:]}") from error

    def last_event(self, engine: str, rank: int = 0) -> int:
        """Number of the last batch of KV events that the router took from an engine's rank; -1: none.

        ``engine``: the end of the engine's ``instance_id``.
        """
        return last_event(self.log, engine, rank)

    def _is_healthy(self) -> bool:
        self.check()
        return answers(f"{self.url}/health")


def last_event(log: str, engine: str, rank: int) -> int:
    """Return the number in a router's log, see ``RouterProcess.last_event``."""
    of_rank = (
        int(number) for source, publisher, number in _SEQUENCE.findall(_COLORS.sub("", log))
        if source.endswith(engine) and publisher == str(rank)
    )  # fmt: skip
    return max(of_rank, default=-1)


class RoutedPod:
    """An engine with KV events, and its sidecar. A context manager that waits until the engine is ready.

    The engine's own prefix cache is off, so its KV is only in the sidecar.
    """

    def __init__(self, log: Path, *, topic: str = "", memory_size: str = "128Mi") -> None:
        port, events_port = free_ports(2)
        self.events = f"tcp://[::1]:{events_port}"
        self.sidecar = SidecarProcess(memory_size=memory_size)
        self._log, self._port, self._stack = log, port, ExitStack()
        self._events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{events_port}",
            "topic": topic,
        }

    engine: ServedEngine

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.sidecar)
            connector = patient_config(self.sidecar.socket_path)
            events = f"--kv-events-config={json.dumps(self._events)}"
            arguments = (events, f"--middleware={MIDDLEWARE}", "--host=::")
            self.engine = stack.enter_context(ServedEngine(self._log, self._port, connector, *arguments))
            self.engine.wait_ready()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    @property
    def instance(self) -> str:
        """Name by which the router knows the engine."""
        with urllib.request.urlopen(f"{self.engine.url}/get_server_info", timeout=60) as answer:
            return str(json.load(answer)["instance_id"])


def _say(text: str) -> None:
    print(f"[router] {text}", file=sys.stderr, flush=True)
