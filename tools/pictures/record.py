"""Record what pictures of the documentation show: ``python -m tools.pictures.record``, about five minutes.

A real vLLM with a tiny model serves chats on the CPU. It restarts once, so the chats continue from the
sidecar's memory and from Redis. A real Prometheus scrapes the sidecar, which is at last shown as the sidecar
of a pod, on a real control plane with a real operator. `make generate` draws the pictures.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from demo.kubernetes import NAMESPACE, RELEASE, condition, is_running
from lmcache_cli.commands import connection
from lmcache_cli.commands.gather import Gathered, gather
from testing.child_process import free_port, reachable_address
from testing.engine.process import ServedEngine, connector_config
from testing.engine.tiny_model import tiny_model
from testing.kube.cluster import Cluster
from testing.kube.operator import SERVICE_ACCOUNT, SYSTEM_NAMESPACE, Operator
from testing.processes import RedisProcess, SidecarProcess
from testing.prometheus import PrometheusProcess
from tools.kube import binaries, machine
from tools.pictures import BOARDS, RECORDING, ROOT
from tools.pictures.boards import load

NAME, POD, SIDECAR_PORT = "chat", "chat-engine-0", 9464
MEMORY_SIZE = "192Mi"
SERVE_SECONDS, PAUSE_SECONDS = 100, 0.25
NUM_CHATS, MAX_TURNS = 24, 8
SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 1024, 700, 24
RATE_INTERVAL, NUM_POINTS = "20s", 120
RESOURCE = {
    "apiVersion": "lmcache.io/v1alpha1",
    "kind": "LMCacheCluster",
    "metadata": {"name": NAME},
    "spec": {
        "model": {"name": "tiny"},
        "engine": {"gpu": {"count": 0}},
        "tiers": {
            "memory": {"size": MEMORY_SIZE},
            "remote": {"external": {"url": "redis://redis.default.svc:6379"}},
        },
    },
}


class Chats:
    """Chats that share a system prompt. Each turn repeats all earlier turns; a chat ends after some turns."""

    def __init__(self) -> None:
        self._random = random.Random(8)
        self._system = self._tokens(SYSTEM_TOKENS)
        self._prompts = [self._system] * NUM_CHATS
        self._turns = itertools.cycle(range(NUM_CHATS))

    def _tokens(self, number: int) -> list[int]:
        return [self._random.randrange(4, 260) for _ in range(number)]

    def serve(self, engine: ServedEngine) -> None:
        """Ask questions for a while."""
        end = time.monotonic() + SERVE_SECONDS
        while time.monotonic() < end:
            # Users who just got an answer often ask again at once.
            chat = self._random.choice([next(self._turns), self._random.randrange(NUM_CHATS // 3)])
            prompt = self._prompts[chat] + self._tokens(QUESTION_TOKENS)
            answer = engine.complete(prompt, max_tokens=ANSWER_TOKENS)["choices"][0]["token_ids"]
            is_over = len(prompt) > SYSTEM_TOKENS + MAX_TURNS * QUESTION_TOKENS
            self._prompts[chat] = self._system if is_over else prompt + answer
            time.sleep(PAUSE_SECONDS)  # the users read


def started(stack: ExitStack, sidecar: SidecarProcess, log: Path) -> ServedEngine:
    """Start an engine whose own prefix cache is on, and wait until it uses the sidecar."""
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    config = connector_config(sidecar.socket_path)
    server = ServedEngine(log, free_port(), config, "--enable-prefix-caching", environment=threads)
    engine = stack.enter_context(server)
    engine.wait_ready()
    sidecar.wait_attached(engine.run_short_request, 2)
    return engine


def job(address: str) -> dict[str, Any]:
    """Return the scrape configuration of the sidecar, with the labels that the chart's monitor gives it."""
    labels = {"namespace": NAMESPACE, "pod": POD, "container": "sidecar", "lmcache_io_cluster": NAME}
    return {"job_name": "sidecars", "static_configs": [{"targets": [address], "labels": labels}]}


def series(prometheus: PrometheusProcess, start: float, end: float) -> Iterator[tuple[str, Any]]:
    """Yield the answers to all queries of the boards, by board, panel and letter."""
    seconds = int(end - start)
    values = {"namespace": NAMESPACE, "cluster": NAME, "model": "tiny"}
    values |= {"__rate_interval": RATE_INTERVAL, "__range": f"{seconds}s"}
    for board in map(load, BOARDS):
        for panel in board.first(BOARDS[board.name]):
            for letter, query in panel.queries(values | board.defaults):
                if panel.kind == "timeseries":
                    step = seconds / NUM_POINTS
                    answer = prometheus.query_range(query, start, end, step)
                else:
                    answer = prometheus.query(query)
                yield (
                    f"{board.name}/{panel.title}/{letter}",
                    [
                        {"labels": line["metric"], "values": line.get("values") or [line["value"]]}
                        for line in answer
                    ],
                )


def rounded(values: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return values with the digits that a picture can show."""
    return [(round(moment, 1), f"{float(value):.4g}") for moment, value in values]


async def gathered(cluster: Cluster) -> Gathered:
    """Read what the commands show."""
    arguments = Namespace(kubeconfig=str(cluster.kubeconfig()), namespace=NAMESPACE, context=None)
    async with connection.connected(arguments) as connected:
        return await gather(connected, NAME)


def shown(cluster: Cluster, address: str, folder: Path) -> Gathered:
    """Make the sidecar the one of a pod, which has its address, and read what commands show of it."""
    cluster.helm("install", RELEASE, str(ROOT / "charts" / "lmcache-operator"), "-n", SYSTEM_NAMESPACE,
                 "--create-namespace")  # fmt: skip
    with Operator(cluster, folder, f"{SYSTEM_NAMESPACE}/{SERVICE_ACCOUNT}") as operator:
        operator.start()
        cluster.api.create("lmcache.io/v1alpha1/lmcacheclusters", RESOURCE, NAMESPACE)
        cluster.wait(lambda: is_running(cluster.api.find("v1/pods", POD, NAMESPACE)))
        status = {"podIP": address, "podIPs": [{"ip": address}]}
        cluster.api.patch("v1/pods", f"{POD}/status", {"status": status}, NAMESPACE)
        cluster.wait(lambda: condition(cluster, "SidecarAttached", NAME) == "True", timeout=120)
        cluster.wait(lambda: condition(cluster, "RemoteTierReachable", NAME) == "True", timeout=120)
        return asyncio.run(gathered(cluster))


def document(figures: Gathered, answers: dict[str, Any]) -> dict[str, Any]:
    """Return the recording. Of the objects, it lacks fields that no command reads."""
    pods: list[dict[str, Any]] = [
        {"pod": each.pod, "stats": each.stats, "answered_at": each.answered_at} for each in figures.pods
    ]
    for each in (figures.cluster, *(pod["pod"] for pod in pods)):
        each["metadata"].pop("managedFields", None)
    return {"time": figures.time, "cluster": figures.cluster, "pods": pods, "series": answers}


def main() -> None:
    folder, chats, address = Path(tempfile.mkdtemp(prefix="lmc-pictures-")), Chats(), reachable_address()
    with ExitStack() as stack:
        redis = stack.enter_context(RedisProcess())
        options = {"memory_size": MEMORY_SIZE, "remote_url": redis.unix_url}
        sidecar = SidecarProcess(**options, http_host=address, http_port=SIDECAR_PORT)
        stack.enter_context(sidecar)
        with ExitStack() as first:
            engine = started(first, sidecar, folder / "engine-1.log")
            prometheus = PrometheusProcess([job(f"{address}:{SIDECAR_PORT}")])
            stack.enter_context(prometheus)
            start = time.time()
            chats.serve(engine)
        chats.serve(started(stack, sidecar, folder / "engine-2.log"))
        answers = dict(series(prometheus, start, time.time()))
        # The API server closes connections that were idle for minutes, so it starts here.
        cluster = stack.enter_context(Cluster(bin_dir=machine.directory(binaries.CLUSTER)))
        recording = document(shown(cluster, address, folder), answers)
    text = json.dumps(recording, separators=(",", ":"))
    paths = {tiny_model(): "tiny", sidecar.folder: "/dev/shm/lmcache", redis.folder: "/run/redis"}
    for path, name in paths.items():  # paths of this machine
        text = text.replace(str(path), name)
    RECORDING.write_text(text + "\n")
    print(f"wrote {RECORDING.relative_to(ROOT)}; now run `make generate`")


if __name__ == "__main__":
    main()
