"""Compare SGLang over the sidecar with SGLang over lmcache 0.5.6's server (``--enable-lmcache``), on the CPU.

Both engines run at the same time, and each prompt meets both in random order: first new, then as a hit,
after both engines have emptied their own caches. The prompt is a whole number of chunks of both sides, and 16
tokens more. So both load and compute the same tokens.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks import sglang_engines
from benchmarks.peers.child import Peer, site_packages
from benchmarks.report import Figure, Report, of, paired, spread
from benchmarks.sglang_engines import BUFFER, NO_HICACHE, PROMPT_TOKENS, Seconds, prompt
from testing.engine import fork_server
from testing.processes import SidecarProcess
from testing.sglang import environment
from testing.sglang.engine import SGLangEngine, lmcache_storage

VERSION = "0.5.6"
WARM_UP, ROUNDS = 1, 9
_STORE_SECONDS = 1.0
"""Time in which the peer stores a prompt. It does not show when it has done so."""


def run() -> Report:
    environment.prepare()
    conditions = (
        f"lmcache {VERSION}, {PROMPT_TOKENS} prompt tokens, {ROUNDS} alternating rounds;"
        " seconds to the first token, ratios of theirs to ours"
    )
    with fork_server.allowed():
        return Report("peer_sglang", conditions, list(_figures()))


def _figures() -> Iterator[Figure]:
    cold: Seconds = {"theirs": [], "ours": []}
    hit: Seconds = {"theirs": [], "ours": []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(Peer(VERSION, "server.py", "serve"))
        sidecar = stack.enter_context(SidecarProcess(memory_size="1Gi"))
        storage = lmcache_storage(sidecar.socket_path)
        engines = {
            "theirs": stack.enter_context(_peers_engine(folder, int(server.round()["port"]))),
            "ours": stack.enter_context(sglang_engines.engine(folder / "ours", storage, **BUFFER)),
        }
        for engine in engines.values():
            sglang_engines.warm_up(engine)
        sglang_engines.wait_attached(engines["ours"])
        for turn in range(WARM_UP + ROUNDS):
            for seconds, tier in ((cold, ""), (hit, "storage")):
                for name in random.sample(list(engines), 2):
                    took = sglang_engines.first_token(engines[name], prompt(turn), tier).first_token_seconds
                    if turn >= WARM_UP:
                        seconds[name].append(took)
                time.sleep(_STORE_SECONDS)
                for engine in engines.values():
                    engine.flush_cache()
    for what, seconds in (("hit", hit), ("cold", cold)):
        yield of(
            f"SGLang, 8k prompt, {what}: theirs of ours", paired(seconds["theirs"], seconds["ours"]), "x"
        )
        for name, samples in seconds.items():
            yield of(f"    {name}: {spread(samples)}", statistics.median(samples) * 1e3, "ms")


def _peers_engine(folder: Path, port: int) -> SGLangEngine:
    """Start an engine with the peer's package, which has the name of ours, instead of this repository."""
    config = folder / "theirs.yaml"
    config.write_text(f"mp_host: 127.0.0.1\nmp_port: {port}\n")
    stand_ins, sglang = environment.variables()["PYTHONPATH"].split(os.pathsep)[:2]
    path = os.pathsep.join((stand_ins, sglang, str(site_packages(VERSION))))
    return sglang_engines.engine(
        folder / "theirs",
        environment={"PYTHONPATH": path, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR"},
        enable_lmcache=True,
        lmcache_config_file=config,
        **NO_HICACHE,
    )
