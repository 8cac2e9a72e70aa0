"""Compare loads from the memory tier of another pod with loads from Redis; hits of a pod that was added.

One sidecar holds the rows in memory and has written them to Redis. Two stores in this process load the same
rows, one from the sidecar and one from Redis: from the first lookup to the lookup that finds all rows in
memory. The loopback is faster than a network, so a network makes the two more alike.

Then a second sidecar starts. Requests of both pods ask for the same prompts, which the first pod has.

``read_pods`` measures what the requests of a pod lose while another one reads from it.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks import path, read_pods
from benchmarks.clients import NAMESPACE, EngineClients, row_keys
from benchmarks.report import Figure, Report, at_least, of, paired
from lmcache_store.tiers.base import ROW_KEY_BYTES, LowerTier, RowKey
from lmcache_store.tiers.header import PART_BYTES
from lmcache_store.tiers.peers.tier import PeersTier
from lmcache_store.tiers.remote.address import DEFAULT_PREFIX, Address, Endpoint
from lmcache_store.tiers.remote.tier import RemoteTier
from testing.child_process import free_ports
from testing.processes import RedisProcess, SidecarProcess

NUM_SETS, ROUNDS, WARM_UP = 8, 21, 2
REQUESTS, PROMPT_ROWS = 100, 4
ANSWER_SECONDS = 1.0
"""Deadline for the pod's answers. The default is meant for machines with a core for each pod."""


def _sets() -> list[list[RowKey]]:
    """Return keys of different rows, in sets. A set leaves memory before its next turn."""
    joined = [row_keys(number, path.NUM_ROWS) for number in range(NUM_SETS)]
    return [[keys[i : i + ROW_KEY_BYTES] for i in range(0, len(keys), ROW_KEY_BYTES)] for keys in joined]


async def _rounds(tiers: dict[str, LowerTier], sets: list[list[RowKey]]) -> dict[str, list[float]]:
    size = 4 * path.NUM_ROWS
    readers = {name: path.Sidecar(tier, size, has_keys=False) for name, tier in tiers.items()}
    for reader in readers.values():
        reader.store.register(NAMESPACE)
        await reader.store.adopt()
    seconds: dict[str, list[float]] = {name: [] for name in tiers}
    for turn in range(ROUNDS + WARM_UP):
        for name in random.sample(list(readers), len(readers)):
            took = await readers[name].load_all(sets[turn % NUM_SETS])
            if turn >= WARM_UP:
                seconds[name].append(took)
    for reader in readers.values():
        await reader.store.close()
        reader.arena.close()
    return seconds


def _hit_ratio(engine: EngineClients, prompts: list[bytes]) -> float:
    """Look up random prompts, as an engine's scheduler does. Returns the share of chunks that were hits."""
    num_hits = num_chunks = 0
    for number in range(REQUESTS):
        keys, request = random.choice(prompts), f"request-{number}"
        while (result := engine.scheduler.lookup(request, [(0, keys)])).is_probing or result.num_pending:
            time.sleep(path.POLL_SECONDS)
        engine.scheduler.release([request])
        num_hits += result.num_leased
        num_chunks += len(keys) // ROW_KEY_BYTES
    return num_hits / num_chunks


def _added_pod(folder: Path, old: EngineClients, options: dict[str, object], prompts: list[bytes]) -> Figure:
    """Start a second pod, and return its share of the first pod's hit ratio."""
    peers = folder / "peers.yaml"
    peers.write_text(f"peers: ['{options['peer_host']}:{options['peer_port']}']")
    added_options = {"peer_port": free_ports(1)[0], "peers_file": peers}
    with SidecarProcess(**options | added_options) as added, EngineClients(added, PART_BYTES) as new:
        added.wait_until(lambda stats: stats["memory"]["usable_bytes"] >= stats["memory"]["capacity_bytes"])
        share = _hit_ratio(new, prompts) / _hit_ratio(old, prompts)
    return at_least(f"hits of {REQUESTS} first requests of a new pod, of an old pod's", share * 100, "%", 90)


def run() -> Report:
    """Measure, and return the figures."""
    sets, (port,) = _sets(), free_ports(1)
    with tempfile.TemporaryDirectory() as folder, RedisProcess() as server:
        password = Path(folder) / "password"
        password.write_text("benchmark")
        options: dict[str, object] = {
            "memory_size": "2Gi", "peer_host": "127.0.0.1", "peer_port": port, "peer_password_file": password,
        }  # fmt: skip
        with (
            SidecarProcess(**options | {"remote_url": server.url}) as pod,
            EngineClients(pod, PART_BYTES) as engine,
        ):
            pod.wait_until(lambda stats: stats["memory"]["usable_bytes"] >= stats["memory"]["capacity_bytes"])
            for keys in sets:  # a full write queue would drop rows
                engine.fill(b"".join(keys))
                pod.wait_until(lambda stats: not stats["num_unwritten_rows"])
            peers = PeersTier(
                [Endpoint("127.0.0.1", port)], prefix=DEFAULT_PREFIX, password=password.read_text,
                timeout_seconds=10, ask_seconds=ANSWER_SECONDS,
            )  # fmt: skip
            redis = RemoteTier(Address.parse(server.url), timeout_seconds=10)
            seconds = asyncio.run(_rounds({"another pod": peers, "Redis": redis}, sets))
            peers.close()
            redis.close()
            prompts = [
                b"".join(keys[i : i + PROMPT_ROWS]) for keys in sets for i in range(0, len(keys), PROMPT_ROWS)
            ]
            added = _added_pod(Path(folder), engine, options, prompts)
    return Report("pods", _conditions(), [*_figures(seconds), added, *read_pods.figures()])


def _figures(seconds: dict[str, list[float]]) -> list[Figure]:
    share = paired(seconds["Redis"], seconds["another pod"])
    rates = {name: path.NUM_ROWS * PART_BYTES / statistics.median(s) / 1e9 for name, s in seconds.items()}
    return [
        at_least("load from another pod, of the rate from Redis", share, "x", 1.2),
        *(of(f"    rate from {name}", rate, "GB/s") for name, rate in rates.items()),
    ]


def _conditions() -> str:
    size = f"{path.NUM_ROWS} rows of {PART_BYTES >> 20} MiB"
    return f"{size}, {ROUNDS} rounds, alternating, TCP on the loopback, checksums verified"
