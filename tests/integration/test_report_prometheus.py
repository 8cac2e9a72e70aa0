"""The past of a cluster, read from a real Prometheus that scrapes real sidecars."""

import asyncio
import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from lmcache_operator.commands.reports.history import History
from lmcache_operator.commands.reports.page import page
from lmcache_operator.commands.reports.prometheus import SECONDS, read_history

from testing.child_process import wait_until
from testing.processes import SidecarProcess
from testing.prometheus import PrometheusProcess
from testing.workloads.replay import Engine
from tests.harness.reports import facts

NAMESPACE, NAME = "team", "qwen3-8b"
ODD = {"data": {"result": [3, {"metric": 1, "values": [[], 1, ["a", "b"], None]}]}}
NUM_ROWS, ROW_BYTES, ROW_TOKENS = 8, 256 << 10, 512


class World:
    """Two sidecars that serve prompts, and their Prometheus."""

    def __init__(self, stack: ExitStack) -> None:
        self.sidecars = [stack.enter_context(SidecarProcess(memory_size="64Mi")) for _ in range(2)]
        self.engines = [Engine(sidecar, bytes(32), ROW_BYTES) for sidecar in self.sidecars]
        for engine in self.engines:
            stack.callback(engine.close)
        targets = [f"127.0.0.1:{sidecar.http_port}" for sidecar in self.sidecars]
        labels = {"namespace": NAMESPACE, "lmcache_io_cluster": NAME}
        job = {"job_name": "sidecars", "static_configs": [{"targets": targets, "labels": labels}]}
        self.prometheus = stack.enter_context(PrometheusProcess([job]))
        self._number = 0

    def serve(self) -> None:
        """Serve a prompt twice on each pod: all of its rows are computed, and then all are in memory."""
        self._number += 1
        keys = tuple(range(1000 * self._number, 1000 * self._number + NUM_ROWS))
        for turn in range(2):
            for pod, engine in enumerate(self.engines):
                engine.serve(f"{self._number}-{turn}-{pod}", keys)

    def read(self, url: str = "", name: str = NAME, seconds: float = 300.0) -> History:
        return asyncio.run(read_history(url or self.prometheus.url, NAMESPACE, name, time.time(), seconds))


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack)


def largest(values: Any) -> float:
    return max((value for value in values if math.isfinite(value)), default=0.0)


def test_past_has_tokens_by_cause_and_bytes_by_tier(world) -> None:
    latest: list[History] = []

    def is_complete() -> bool:
        world.serve()
        latest[:] = [world.read()]
        tokens = latest[0].tokens
        return largest(tokens.get("memory", ())) > 0 and largest(tokens.get("new", ())) > 0

    wait_until(is_complete, timeout=120, what="two scrapes with prompts")
    past = latest[0]
    assert past.problem == ""
    assert past.sizes.keys() == {"memory"}
    assert largest(past.sizes["memory"]) == 2 * (64 << 20)
    used = sum(sidecar.stats()["memory"]["used_bytes"] for sidecar in world.sidecars)
    assert 0 < largest(past.used["memory"]) <= used
    assert len(past.times) == len(past.tokens["memory"]) == 61
    text = page(facts(history=past, since="5m"))
    assert "Prompt tokens per second, by source" in text
    assert "Memory tier of all pods, in MiB" in text


def test_rates_add_up_to_the_tokens_of_prompts(world) -> None:
    for _ in range(3):
        world.serve()
    tokens = sum(sidecar.stats()["causes"]["prompt_tokens"] for sidecar in world.sidecars)
    query = f'sum(lmcache_cause_tokens_total{{lmcache_io_cluster="{NAME}"}})'
    wait_until(
        lambda: [float(each["value"][1]) for each in world.prometheus.query(query)] == [tokens],
        timeout=60,
        what="Prometheus has all tokens",
    )


def test_other_cluster_has_no_past(world) -> None:
    problem = world.read(name='other"} or vector(1) #').problem
    assert "has no metrics of this cluster" in problem


@pytest.mark.parametrize("seconds", [60.0, 86_400.0, 366 * 86_400.0])
def test_any_length_of_the_past_can_be_read(world, seconds) -> None:
    wait_until(lambda: not world.read(seconds=seconds).problem, timeout=60, what="Prometheus has series")
    assert len(world.read(seconds=seconds).times) <= 242


def test_sidecar_is_no_prometheus(world) -> None:
    problem = world.read(f"http://127.0.0.1:{world.sidecars[0].http_port}").problem
    assert "cannot be used: HTTP 404" in problem


def test_server_that_does_not_listen_is_reported_without_the_password(world) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    problem = world.read(f"http://user:secret@127.0.0.1:{port}/prefix?token=secret").problem
    assert f"Prometheus at http://127.0.0.1:{port}/prefix cannot be used" in problem
    assert "secret" not in problem


def test_server_that_never_answers_is_reported(world) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        problem = world.read(f"http://127.0.0.1:{listener.getsockname()[1]}").problem
    assert f"did not answer within {SECONDS:g} s" in problem


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, b"x" * (9 << 20), "larger than 8 MiB"),
        (200, b"<html>", "HTTP 200, and the answer is not JSON"),
        (422, b'{"error": "too many\x07 samples"}', "HTTP 422"),
        (503, b"[]", "HTTP 503"),
        (200, b"[" * 100_000, "not JSON"),
        (200, b"{}", "has no metrics of this cluster"),
        (302, b"{}", "HTTP 302"),
        (200, json.dumps(ODD).encode(), "has no metrics of this cluster"),
    ],
)  # fmt: skip
def test_unusable_answers_are_problems(world, status, body, expected) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Location", "http://127.0.0.1:1/")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:
                return

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert expected in world.read(f"http://127.0.0.1:{server.server_port}").problem
        finally:
            server.shutdown()
            thread.join()
