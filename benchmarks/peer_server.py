"""Compare sidecar and vLLM connector with those of lmcache 0.5.6 (`lmcache server`, on the CPU).

Each round moves 2,048 tokens of an 8B model's paged KV from the engine's process into the cache and back,
with all calls. The peer's own bench client drives the peer, in both of its modes. Rounds alternate.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from benchmarks.clients import BLOCK_TOKENS, CHUNK_TOKENS, EngineClients, row_keys, words
from benchmarks.peers.child import CHILDREN, Peer, site_packages
from benchmarks.report import Figure, Report, at_least, of, paired, spread
from benchmarks.transfer import BLOCKS, BLOCKS_PER_CHUNK, CHUNK_BYTES, CHUNKS, TOTAL_BYTES, make_kv
from benchmarks.vllm import prompt, ttft
from lmcache_client.core.copier import CpuCopier
from lmcache_client.core.grid import Grid
from lmcache_client.core.jobs import GroupStore, LoadJob, Offer, StoreJob
from lmcache_client.core.transfers import LoadTransfer, StoreTransfer
from lmcache_store.kv_groups import KVGroup
from testing.child_process import REPOSITORY
from testing.engine.process import EngineProcess, connector_config
from testing.processes import SidecarProcess

VERSION = "0.5.6"
MODES = ("engine_driven", "lmcache_driven")
SHAPE = "(2,1024,16,8,128):float16:32"
SMALL_SHAPE = "(2,4096,16,1,8):float16:1"  # for long prompts: only lookups are timed
WARM_UP, ROUNDS = 2, 11
NUM_KEYS, LOOKUPS = 128, 50
GRID = Grid(CHUNK_TOKENS, BLOCK_TOKENS, (KVGroup(0, BLOCK_TOKENS, CHUNK_BYTES),))

Seconds = dict[str, list[float]]


class OurPath:
    """Work of the connector's two sides for one prompt, on a real sidecar."""

    def __init__(self, engine: EngineClients) -> None:
        self._engine = engine
        self._kv = make_kv()
        self._copiers = {threads: CpuCopier({0: self._kv}, threads) for threads in (1, 2)}
        self._lookups = ThreadPoolExecutor(1)  # leases are messages
        self._random = np.random.default_rng(0)

    def round(self, turn: int) -> dict[str, float]:
        """Return the seconds of a store, and of loads on one and two threads."""
        blocks = tuple(map(int, self._random.permutation(BLOCKS)[: CHUNKS * BLOCKS_PER_CHUNK]))
        stored = GroupStore(0, 0, row_keys(turn, CHUNKS), blocks)
        transfer = StoreTransfer(StoreJob(turn, f"store-{turn}", (stored,)))
        start = time.perf_counter()
        transfer.run(self._engine.worker, self._copiers[1])
        seconds = {"store": time.perf_counter() - start}
        before = [pages[list(blocks)].clone() for pages in self._kv.pages[:: len(self._kv.pages) - 1]]
        for threads in (1, 2):
            for pages in self._kv.pages:
                pages.zero_()
            start = time.perf_counter()
            self._load(stored, f"load-{turn}-{threads}", threads)
            seconds[f"retrieve, {threads}"] = time.perf_counter() - start
            after = [pages[list(blocks)] for pages in self._kv.pages[:: len(self._kv.pages) - 1]]
            if not all(torch.equal(*pair) for pair in zip(before, after, strict=True)):
                raise RuntimeError("a load did not return the stored KV")
        return seconds

    def _load(self, stored: GroupStore, request_id: str, threads: int) -> None:
        hits = self._engine.find(words(stored.keys))
        lease = self._lookups.submit(self._engine.scheduler.lookup, request_id, [(0, stored.keys)])
        num_tokens = CHUNKS * CHUNK_TOKENS
        offer = Offer(0, num_tokens, (hits,))
        load = LoadJob.from_offer(request_id, GRID, offer, num_tokens, [stored.blocks])
        transfer = LoadTransfer(load, None)
        transfer.run(self._engine.worker, self._copiers[threads])
        if transfer.bad_blocks:
            raise RuntimeError("a load failed")
        lease.result()
        self._lookups.submit(self._engine.scheduler.release, [request_id])


def path() -> Iterator[Figure]:
    with ExitStack() as stack:
        sidecar = stack.enter_context(SidecarProcess(memory_size="3Gi"))
        ours = OurPath(stack.enter_context(EngineClients(sidecar, CHUNK_BYTES)))
        peers = {
            mode: stack.enter_context(Peer(VERSION, "server.py", mode, 2048, SHAPE, 5)) for mode in MODES
        }
        mine: list[dict[str, float]] = []
        theirs: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
        for turn in range(WARM_UP + ROUNDS):
            for side in random.sample([*MODES, ""], 3):
                if side:
                    theirs[side].append(peers[side].round())
                else:
                    mine.append(ours.round(turn))
    for what, operation, ours_name, bar in (
        ("load, 1 thread", "retrieve", "retrieve, 1", 1.8),
        ("load, 2 threads", "retrieve", "retrieve, 2", 2.5),
        ("store, 1 thread", "store", "store", 3.0),
    ):
        our_seconds = [seconds[ours_name] for seconds in mine[WARM_UP:]]
        samples = {mode: [seconds[operation] for seconds in theirs[mode][WARM_UP:]] for mode in MODES}
        better = min(MODES, key=lambda mode: statistics.median(samples[mode]))
        yield at_least(f"{what}, of {better}", paired(samples[better], our_seconds), "x", bar)
        yield of("    ours", TOTAL_BYTES / statistics.median(our_seconds) / 1e9, "GB/s")
        for mode in MODES:
            yield of(f"    {mode}", TOTAL_BYTES / statistics.median(samples[mode]) / 1e9, "GB/s")


def lookups() -> Iterator[Figure]:
    names = row_keys(0, NUM_KEYS)
    indexed = words(names)
    seconds: Seconds = {"theirs": [], "ours": []}
    with (
        SidecarProcess(memory_size="64Mi") as sidecar,
        EngineClients(sidecar, 4096) as engine,
        Peer(VERSION, "server.py", MODES[0], NUM_KEYS * CHUNK_TOKENS, SMALL_SHAPE, LOOKUPS) as peer,
    ):
        engine.fill(names)
        for turn in range(WARM_UP + ROUNDS):
            theirs, our_seconds = peer.round()["lookup"], []
            for _ in range(LOOKUPS):
                start = time.perf_counter()
                hits = engine.find(indexed)
                our_seconds.append(time.perf_counter() - start)
                if len(hits.rows) != NUM_KEYS:
                    raise RuntimeError(f"{len(hits.rows)} of {NUM_KEYS} keys were found")
            if turn >= WARM_UP:
                seconds["theirs"].append(theirs)
                seconds["ours"].append(statistics.median(our_seconds))
    faster = paired(seconds["theirs"], seconds["ours"])
    yield at_least(f"lookup of {NUM_KEYS} keys, p50, theirs of ours", faster, "x", 10)
    for side, samples in seconds.items():
        yield of(f"    {side}", statistics.median(samples) * 1e6, "us")


class PeersEngine(EngineProcess):
    """The same engine, with the peer's package first on its path."""

    child = (CHILDREN / "engine.py", REPOSITORY / "testing" / "engine" / "child.py")

    def __init__(self, log: Path, connector: dict[str, object]) -> None:
        self.python_path = site_packages(VERSION)
        super().__init__(log, connector)


def in_vllm() -> Iterator[Figure]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(Peer(VERSION, "server.py", "serve"))
        port = int(server.round()["port"])
        config: dict[str, object] = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
        }
        sidecar = stack.enter_context(SidecarProcess(memory_size="2Gi"))
        engines = {
            "theirs": stack.enter_context(PeersEngine(folder / "theirs", config)),
            "ours": stack.enter_context(
                EngineProcess(folder / "ours", connector_config(sidecar.socket_path))
            ),
        }
        cold: Seconds = {name: [] for name in engines}
        hit: Seconds = {name: [] for name in engines}
        for engine in engines.values():
            engine.wait_ready().stop_hashing_kv()
        for turn in range(WARM_UP + ROUNDS):
            for seconds, is_hit in ((cold, False), (hit, True)):
                for name in random.sample(list(engines), 2):
                    took = ttft(engines[name], prompt(turn), is_hit=is_hit)
                    if turn >= WARM_UP:
                        seconds[name].append(took)
                time.sleep(0.5)  # the peer shows stored KV only after a delay
    for what, seconds in (("hit", hit), ("cold", cold)):
        yield of(f"vLLM, 8k prompt, {what}: theirs of ours", paired(seconds["theirs"], seconds["ours"]), "x")
        for name in engines:
            yield of(f"    {name}: {spread(seconds[name])}", statistics.median(seconds[name]) * 1e3, "ms")


def run() -> Report:
    conditions = f"lmcache {VERSION}, torch {torch.__version__}, {ROUNDS} alternating rounds, medians"
    return Report("peer_server", conditions, [*lookups(), *path(), *in_vllm()])
