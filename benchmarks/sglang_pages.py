"""Measure loads and stores of pages by SGLang's storage interface, without an engine.

SGLang's own host pool for an 8B model (32 layers, 8 heads of 128 values of bfloat16), pages of 64 tokens, and
a real sidecar. A load is one call of ``batch_get_v1``, after the lookup that SGLang makes before it. The
reference is memcpy of the same pieces between the pool and a file in shared memory: one thread, in C.

As a program, this module runs with SGLang's modules and prints the seconds of all rounds as JSON.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import mmap
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import yardstick
from benchmarks.report import Figure, at_least, of, paired
from testing.child_process import wait_until
from testing.engine.tiny_model import tiny_model
from testing.processes import SidecarProcess
from testing.sglang.engine import lmcache_storage
from testing.sglang.program import Program

LAYERS, HEADS, HEAD_DIM, PAGE_TOKENS = 32, 8, 128, 64
PIECE_BYTES = PAGE_TOKENS * HEADS * HEAD_DIM * 2
"""Keys or values of one layer, in one page."""
PAGE_BYTES = 2 * LAYERS * PIECE_BYTES
PAGES, POOL_PAGES = 32, 40
TOTAL_BYTES = PAGES * PAGE_BYTES
LAYOUTS = ("page_first_direct", "layer_first")
WARM_UP, ROUNDS = 3, 11  # the arena holds the pages of three rounds
MEMCPY = "memcpy of the same pieces"

THREADS = ("1 thread", "2 threads")
"""Threads of a load."""

Seconds = dict[str, list[float]]


def measure(folder: Path) -> dict[str, Seconds]:
    """Return the seconds of each way, by layout of the host pool."""
    with SidecarProcess(memory_size="832Mi") as sidecar:
        log, module = folder / "pages", "benchmarks.sglang_pages"
        with Program("the program that copies pages", log, module, [sidecar.socket_path]) as program:
            answer = program.finish().splitlines()[-1]
    seconds: dict[str, Seconds] = json.loads(answer)
    return seconds


def figures(measured: dict[str, Seconds]) -> Iterator[Figure]:
    """Yield speeds as shares of memcpy, and rates."""
    for layout, seconds in measured.items():
        for what, bar in (("load", 80), ("store", 0)):
            reference = seconds[f"{what}, {MEMCPY}"]
            for threads in THREADS:
                if (ours := seconds.get(f"{what}, {threads}")) is None:
                    continue
                share = paired(reference, ours)
                label = f"{what} of pages, {layout}, {threads}, of {MEMCPY}"
                has_bar = bar and threads == THREADS[0]
                yield at_least(label, share, "%", bar) if has_bar else of(label, share, "%")
                yield Figure("    rate", TOTAL_BYTES / statistics.median(ours) / 1e9, "GB/s")
        yield Figure(f"lookup of {PAGES} pages, {layout}", statistics.median(seconds["lookup"]) * 1e3, "ms")


# ---- the program ----


def main() -> None:
    """Measure both layouts. The argument is the socket of the sidecar."""
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    importlib.import_module("sglang_on_cpu").register()
    storage = lmcache_storage(sys.argv[1])  # an engine that starts with the cache shares its KV
    extra = json.dumps(storage.extra_config)
    arguments = ServerArgs(
        model_path=str(tiny_model()),
        device="cpu",
        hicache_storage_backend=storage.backend,
        hicache_storage_backend_extra_config=extra,
    )
    arguments.resolve_once()
    publish(arguments, role="scheduler")
    print(json.dumps({layout: _measured(layout, sys.argv[1]) for layout in LAYOUTS}), flush=True)


def _measured(layout: str, socket: str) -> Seconds:
    with ExitStack() as stack:
        pool = _pool(layout)
        backends = {
            name: stack.enter_context(closing(_backend(pool, socket, number)))
            for number, name in enumerate(THREADS, 1)
        }
        memory = stack.enter_context(tempfile.TemporaryFile(dir="/dev/shm"))
        memory.truncate(TOTAL_BYTES)
        copy = np.frombuffer(mmap.mmap(memory.fileno(), TOTAL_BYTES), np.uint8)
        seconds: Seconds = {}
        for number in range(WARM_UP + ROUNDS):
            for name, took in Round(pool, number, copy).run(backends):
                if number >= WARM_UP:
                    seconds.setdefault(name, []).append(took)
    return seconds


class Round:
    """Stores of new pages and loads of them, each by all ways in random order."""

    def __init__(self, pool: Any, number: int, copy: npt.NDArray[np.uint8]) -> None:
        self._pool = pool
        self._pages = random.Random(number).sample(range(POOL_PAGES), PAGES)
        self._keys = [
            hashlib.sha256(f"{pool.layout} {number} {page}".encode()).hexdigest() for page in range(PAGES)
        ]
        self._indices = torch.cat([self._tokens(page) for page in self._pages])
        addresses = range(copy.ctypes.data, copy.ctypes.data + TOTAL_BYTES, PIECE_BYTES)
        self._pieces = list(zip(_piece_addresses(pool, self._pages), addresses, strict=True))

    def run(self, backends: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
        """Yield (way, seconds)."""
        first = next(iter(backends))  # stores use one thread
        stores: dict[str, Callable[[], None]] = {
            first: partial(self._store, backends[first]),
            MEMCPY: self._memcpy(is_load=False),
        }
        for name in random.sample(list(stores), len(stores)):
            yield f"store, {name}", _timed(stores[name])
        memcpy = self._memcpy(is_load=True)
        for name in random.sample([*backends, MEMCPY], len(backends) + 1):
            if name == MEMCPY:
                yield f"load, {name}", _timed(memcpy)
            else:
                yield from self._load(name, backends[name])

    def _store(self, backend: Any) -> None:
        if not all(backend.batch_set_v1(self._keys, self._indices)):
            raise RuntimeError("a page was not stored")

    def _load(self, name: str, backend: Any) -> Iterator[tuple[str, float]]:
        """Look up and load all pages. Compares the first and the last one with what was stored."""
        compared = [
            self._pool.get_data_page(page * PAGE_TOKENS, flat=False) for page in self._pages[:: PAGES - 1]
        ]
        expected = [page.clone() for page in compared]
        for page in compared:
            page.zero_()
        start = time.perf_counter()
        num_hits = backend.batch_exists(self._keys)
        looked_up = time.perf_counter()
        loaded = backend.batch_get_v1(self._keys, self._indices)
        end = time.perf_counter()
        if num_hits != PAGES or not all(loaded) or not all(map(torch.equal, compared, expected)):
            raise RuntimeError(f"{num_hits} pages found, {sum(loaded)} loaded, or wrong bytes")
        yield "lookup", looked_up - start
        yield f"load, {name}", end - looked_up

    def _memcpy(self, *, is_load: bool) -> Callable[[], None]:
        pairs = self._pieces if is_load else [(copy, pool) for pool, copy in self._pieces]
        return yardstick.copy(pairs, PIECE_BYTES)

    @staticmethod
    def _tokens(page: int) -> torch.Tensor:
        return torch.arange(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)


def _piece_addresses(pool: Any, pages: list[int]) -> Iterator[int]:
    """Yield the addresses of the pieces of these pages, in the order of a slot of the arena."""
    for page in pages:
        for half in (pool.k_buffer, pool.v_buffer):
            for layer in range(LAYERS):
                piece = half[page, layer] if pool.layout != "layer_first" else half[layer, page * PAGE_TOKENS]
                yield piece.data_ptr()


def _pool(layout: str) -> Any:
    """Return SGLang's host pool of an 8B model, with random bytes."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    on_device = MHATokenToKVPool(
        size=PAGE_TOKENS,
        page_size=PAGE_TOKENS,
        dtype=torch.bfloat16,
        head_num=HEADS,
        head_dim=HEAD_DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    info = on_device.get_device_pool_infos()[0].buffer_info
    layers = {"start_layer": 0, "end_layer": LAYERS}
    pool = MHATokenToKVPoolHost(
        info, POOL_PAGES, 0, PAGE_TOKENS, layout, device_capacity_tokens=PAGE_TOKENS, **layers
    )
    pool.kv_buffer.normal_()
    return pool


def _backend(pool: Any, socket: str, num_threads: int) -> Any:
    """Return a storage backend with this pool, attached to the sidecar."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    from lmcache_client.sglang.backend import LMCacheBackend

    ranks = dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank"), 0)
    sizes = dict.fromkeys(("tp_size", "pp_size", "attn_cp_size"), 1)
    config = HiCacheStorageConfig(
        **ranks,
        **sizes,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=pool.layout != "layer_first",
        model_name="tiny",
        extra_config=lmcache_storage(socket, copy_threads=num_threads).extra_config,
    )
    backend = LMCacheBackend(config)
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    wait_until(lambda: backend._access is not None and backend._access.is_attached, what="attached")
    return backend


def _timed(way: Callable[[], None]) -> float:
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
