"""vLLM's own tiering manager and CPU tier over ``LMCacheTier``, without an engine.

The world calls them as OffloadingConnector's scheduler side does. Everything that a lookup finds is compared
with the bytes stored under that key: a wrong byte raises.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import os
import time
from collections.abc import Sequence
from concurrent import futures
from types import SimpleNamespace

import numpy as np
from vllm.v1.kv_offload import config as offload_config
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from lmcache.engines.vllm.tier import LMCacheTier

ROW_BYTES = 16 << 10
TIMEOUT = 60.0
"""Timeout of waits that raise: a busy machine must not fail a test."""

PATIENT = {"lookup_seconds": 60, "job_seconds": 60}
"""Settings with which no operation times out on a slow machine."""

SHARED = {"weights_fingerprint": "w1", **PATIENT, "remote_timeout_seconds": 30}
"""Settings of engines that share chunks."""

_NAMES = itertools.count()


def make_config(**model: object) -> offload_config.OffloadingConfig:
    """The configuration that vLLM passes to a tier. ``model`` sets name and dtype."""
    has_group_id = "group_id" in offload_config.OffloadingGroupConfig.__dataclass_fields__
    group_ids = {"group_id": 0} if has_group_id else {}
    return offload_config.OffloadingConfig(
        groups=(offload_config.OffloadingGroupConfig(tokens_per_block=32, layer_names=("l0",), **group_ids),),
        worker_kv_bytes_per_block=ROW_BYTES,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id=f"lmc-{os.getpid()}-{next(_NAMES)}",
        model=offload_config.OffloadingModelConfig(**{"name": "m", "dtype": "float32", **model}),
        cache=offload_config.OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=1),
        parallel=offload_config.OffloadingParallelConfig(
            0, 1, 1, 1, 1, 1, 0, 1, None, is_parallelism_agnostic=False
        ),
    )


def key_of(name: object, group: int = 0) -> bytes:
    return make_offload_key(hashlib.sha256(repr(name).encode()).digest(), group)


KEYS = [key_of(number) for number in range(6)]
"""The chunks of a prompt."""


def content_of(key: bytes, generation: object = 0) -> np.ndarray:
    """KV of this key only, computed with these weights."""
    seed = hashlib.sha256(key + repr(generation).encode()).digest()
    return np.frombuffer(seed * (ROW_BYTES // len(seed)), np.uint8)


class OffloadingWorld:
    """The tiers of one engine, as a context manager. ``settings`` are those of the tier."""

    def __init__(
        self, num_rows: int = 8, config: object = None, waits_for_weights: bool = True, **settings: object
    ) -> None:
        self.weights: object = 0
        config = config or make_config()
        region = _call(
            SharedOffloadRegion,
            engine_id=config.engine_id,
            num_chunks=num_rows,
            rank=None,
            kv_bytes_per_chunk=ROW_BYTES,
            cpu_page_size=ROW_BYTES,
        )
        primary = _call(CPUPrimaryTierOffloadingManager, num_chunks=num_rows, mmap_region=region)
        view = primary.get_kv_memoryview()
        entry = {"type": "LMCacheTier", "module_path": "lmcache.engines.vllm.tier", **settings}
        spec = SimpleNamespace(config=config)
        self.tier: LMCacheTier = SecondaryTierFactory.create_secondary_tier(entry, view, spec)
        self.manager = TieringOffloadingManager(primary, [self.tier])
        self.primary = primary
        self.region_path = region.mmap_path
        self.rows = np.asarray(view).view(np.uint8)
        if not self.tier._is_off:
            indexed = getattr(self.tier._tier, "indexed", None)
            assert indexed is None or indexed.wait(TIMEOUT)  # a disk tier refuses stores before
            assert not waits_for_weights or not futures.wait([self.tier._weights], TIMEOUT).not_done

    def __enter__(self) -> OffloadingWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        del self.rows
        self.manager.shutdown()
        assert not os.path.exists(self.region_path)

    def step(self) -> None:
        """End one step of the scheduler."""
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def wait(self, condition) -> None:
        """Step until the condition is true."""
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError("the condition does not become true")
            time.sleep(0.001)  # real time: polls
            self.step()

    def reset(self, new_weights: object) -> None:
        """Reset the cache as before a weight update. Afterwards the weights are new."""
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):  # since 0.33: the workers have no transfers left
            self.manager.on_reset_flushed()
        self.weights = new_weights

    def settle(self) -> None:
        """Step until no job is in progress. Then every job was reported and no row is held."""
        self.wait(lambda: not self.manager._jobs)
        assert not self.tier._open

    def request(self, name: str | None = None) -> ReqContext:
        context = ReqContext(name or f"request {next(_NAMES)}")
        self.manager.on_new_request(context)
        return context

    def finish(self, context: ReqContext) -> None:
        self.manager.on_request_finished(context)

    def store(self, *keys: bytes) -> int:
        """Compute chunks in a request. Returns the number that the CPU tier accepted and now stores."""
        context = self.request()
        output = self.manager.prepare_store(keys, context)
        accepted = [] if output is None else output.keys_to_store
        if accepted:
            for key, row in zip(accepted, rows_of(output.store_spec), strict=True):
                self.rows[row] = content_of(key, self.weights)
            self.manager.complete_store(accepted, context)
        self.finish(context)
        return len(accepted)

    def look(self, context: ReqContext, keys: Sequence[bytes]) -> list[LookupResult]:
        """Look keys up once, as OffloadingConnector does for one KV group of full attention."""
        results = []
        for key in keys:
            results.append(self.manager.lookup(key, context))
            if results[-1] is LookupResult.MISS:
                break
        self.step()
        return results

    def load(self, *keys: bytes) -> int:
        """Look keys up until all are answered, and load the leading hits. Returns their number."""
        context = self.request()
        results: list[LookupResult] = []

        def is_answered() -> bool:
            results[:] = self.look(context, keys)
            return not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(results)

        self.wait(is_answered)
        hits = keys[: results.count(LookupResult.HIT)]
        if hits:
            spec = self.manager.prepare_load(hits, context)
            for key, row in zip(hits, rows_of(spec), strict=True):
                assert np.array_equal(self.rows[row], content_of(key, self.weights)), "wrong KV"
            self.manager.complete_load(hits, context)
        self.finish(context)
        return len(hits)

    def forget_primary(self) -> None:
        """Fill the CPU tier with unused chunks, so that only the lower tier holds the others."""
        self.settle()
        for number in range(len(self.rows)):
            assert self.store(key_of(("filler", next(_NAMES), number))), "a row is held without a user"
            self.settle()


def rows_of(spec) -> list[int]:
    return list(spec.block_ids)


def _call(make, **arguments):
    """Call ``make``. For vLLM 0.29, which says blocks where later versions say chunks, rename arguments."""
    if "num_chunks" not in inspect.signature(make.__init__).parameters:
        arguments = {name.replace("chunk", "block"): value for name, value in arguments.items()}
    return make(**arguments)
