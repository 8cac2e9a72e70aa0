"""Measure SGLang with the cache: time to first token, throughput, copies of pages.

Each prompt of 8,208 tokens meets all ways, in random order, on engines that run at the same time. Engines
that share no KV give the references:

- an engine without HiCache, for cold prompts
- an engine with HiCache alone: cold, and a hit in SGLang's own host pool. For that hit, another prompt evicts
  the prompt from the engine's own KV first.
- engines with SGLang's own storage backend ``file``, in a folder in memory and on a disk. The files on the
  disk are dropped from the page cache before a hit.

SGLang computes a hit's new tokens only (``testing.sglang.engine.MEASURED``). Otherwise its attention for CPUs
would compute those of the document again, and no difference between the ways would show.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import sglang_engines, sglang_pages, sglang_throughput
from benchmarks.report import Figure, Report, at_most, of, paired, spread
from benchmarks.sglang_engines import (
    BUFFER,
    HIT_TOKENS,
    NO_HICACHE,
    PAGES,
    PROMPT_TOKENS,
    Seconds,
    Stores,
    prompt,
)
from testing.engine import fork_server
from testing.processes import RedisProcess, SidecarProcess
from testing.sglang import environment
from testing.sglang.engine import SGLangEngine, file_storage, lmcache_storage

STARTS, PROMPTS = 2, 6
"""Number of starts of all engines, and prompts per start."""
NO_CACHE, ALONE, OURS = "no HiCache", "HiCache alone", "LMCache"
IN_MEMORY, ON_DISK, REDIS = "file in memory", "file on a disk", "Redis"
HOST_RATIO = PROMPTS + 2
"""Size of SGLang's own host cache: all prompts of a start."""


class Engines(NamedTuple):
    """Engines that run at the same time, by name."""

    by_name: dict[str, SGLangEngine]
    folders: dict[str, Path]
    """Folders of engines that store files."""
    sidecar: SidecarProcess
    """Cache of the engine ``OURS``, above a Redis."""


@contextmanager
def engines(folder: Path) -> Iterator[Engines]:
    """Start all engines."""
    with ExitStack() as stack:
        redis = stack.enter_context(RedisProcess())
        sidecar = stack.enter_context(SidecarProcess(memory_size="512Mi", remote_url=redis.unix_url))
        shm = tempfile.TemporaryDirectory(prefix="lmc-files-", dir="/dev/shm")
        folders = {IN_MEMORY: Path(stack.enter_context(shm)), ON_DISK: folder / "files"}
        ways: dict[str, dict[str, Any]] = {
            NO_CACHE: NO_HICACHE,
            ALONE: {"hicache_ratio": HOST_RATIO},
            OURS: {"storage": lmcache_storage(sidecar.socket_path), **BUFFER},
            **{name: {"storage": file_storage(files)} for name, files in folders.items()},
        }
        started = {
            name: stack.enter_context(sglang_engines.engine(folder / f"{name}.log", **options))
            for name, options in ways.items()
        }
        for each in started.values():
            sglang_engines.warm_up(each)
        for name in (OURS, *folders):
            sglang_engines.wait_attached(started[name])
        yield Engines(started, folders, sidecar)


class FirstTokens(NamedTuple):
    """Samples of all starts."""

    cold: Seconds
    """Seconds to the first token of new prompts, by engine."""
    hit: Seconds
    """Seconds to the first token of hits, by way."""
    queued: Seconds
    """Seconds of these until the engine begins to compute. It waits for the storage."""

    @classmethod
    def empty(cls) -> FirstTokens:
        names = NO_CACHE, ALONE, OURS, IN_MEMORY, ON_DISK
        hits = *names[1:], REDIS
        samples: list[Seconds] = [{name: [] for name in group} for group in (names, hits, hits)]
        return cls(*samples)

    def measure(self, running: Engines, seed: object) -> None:
        """Run one prompt in all ways."""
        tokens, sidecar = prompt(seed), running.sidecar
        stores = Stores.begin(running.by_name[OURS], sidecar)
        stored = {name: running.by_name[name].num_stored_tokens() for name in running.folders}
        for name in random.sample(list(running.by_name), len(running.by_name)):
            answer = sglang_engines.first_token(running.by_name[name], tokens)
            self.cold[name].append(answer.first_token_seconds)
        stores.wait(PAGES)
        for name, before in stored.items():
            running.by_name[name].wait_stored(before + HIT_TOKENS)
        _drop_from_page_cache(running.folders[ON_DISK])
        tiers = {ALONE: "host", OURS: "storage", IN_MEMORY: "storage", ON_DISK: "storage"}
        for name in random.sample(list(tiers), len(tiers)):
            self._measure_hit(name, running.by_name[name], tokens, tiers[name])
        sglang_engines.forget_memory(running.by_name[OURS], sidecar)
        self._measure_hit(REDIS, running.by_name[OURS], tokens, "storage")

    def _measure_hit(self, name: str, engine: SGLangEngine, tokens: list[int], tier: str) -> None:
        if tier == "host":
            # Evicts the prompt from the engine's own KV. It is new once, and later a hit in host memory.
            engine.generate(prompt("other"), 1)
        else:
            engine.flush_cache()
        answer = sglang_engines.first_token(engine, tokens, tier)
        self.hit[name].append(answer.first_token_seconds)
        self.queued[name].append(answer.meta["queue_time"])

    def conditions(self) -> str:
        """Describe the run, with median and range of each sample."""
        lines = [
            "SGLang on the CPU, a tiny Llama (fp32, 4 KiB of KV per token), Redis over a UNIX socket;",
            f"{STARTS} starts of all engines, each with {PROMPTS} prompts of {PROMPT_TOKENS} tokens;",
            "ratios are medians of neighbours' with 95 % intervals. Time to first token, median (min-max):",
        ]
        lines += [f"  cold  {name:<14}  {spread(seconds)}" for name, seconds in self.cold.items()]
        lines += [
            f"  hit   {name:<14}  {spread(seconds)}; in the queue {spread(self.queued[name])}"
            for name, seconds in self.hit.items()
        ]
        return "\n".join(lines)

    def figures(self) -> Iterator[Figure]:
        """Yield ratios."""
        cold, hit = self.cold[OURS], self.hit[OURS]
        host_hit = paired(hit, self.hit[ALONE])
        yield at_most("memory hit, of a hit in SGLang's own host pool", host_hit, "x", 1.5)
        yield of("memory hit, share of cold", paired(hit, cold), "%")
        yield of("Redis hit, share of cold", paired(self.hit[REDIS], cold), "%")
        for name in (IN_MEMORY, ON_DISK):
            yield of(f"memory hit, of SGLang's own {name}", paired(hit, self.hit[name]), "x")
        for name in (ALONE, NO_CACHE):
            yield of(f"speed of one cold prompt, of {name}", paired(self.cold[name], cold), "%")


def run() -> Report:
    environment.prepare()
    firsts, throughput = FirstTokens.empty(), sglang_throughput.Measured.empty()
    with tempfile.TemporaryDirectory() as name, fork_server.allowed():
        pages = sglang_pages.measure(Path(name))
        for start in range(STARTS):
            folder = Path(name, str(start))
            folder.mkdir()
            with engines(folder) as running:
                for number in range(PROMPTS):
                    firsts.measure(running, f"{start} {number}")
            with sglang_throughput.pods(folder) as pods:
                sglang_throughput.measure(pods, throughput)
    parts = firsts.conditions(), sglang_throughput.conditions(throughput)
    return Report(
        "sglang",
        "\n".join(parts),
        [
            *firsts.figures(),
            *sglang_throughput.figures(throughput),
            *sglang_pages.figures(pages),
        ],
    )


def _drop_from_page_cache(folder: Path) -> None:
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
