"""Time the engine of lmcache 0.3.0: one store and one retrieve of the same KV per line of input.

This program runs in that package's environment, on a machine without a GPU. It disables the package's use of
CUDA, which is to the package's advantage: no pinning, and results remain in host memory. The unused extension
of its CacheGen codec is empty. Each round has new tokens, because the package raises KeyError when it stores
the same tokens again.
"""

from __future__ import annotations

import json
import os
import sys
import time
import types

os.environ["LMCACHE_TRACK_USAGE"] = "false"  # otherwise the package sends usage data
os.environ["LMCACHE_LOG_LEVEL"] = "ERROR"

import torch

sys.modules["lmcache.c_ops"] = types.ModuleType("lmcache.c_ops")
_empty = torch.empty
torch.empty = lambda *shape, pin_memory=False, **options: _empty(*shape, **options)

import lmcache.cache_engine as cache_engine  # noqa: E402
from lmcache.config import LMCacheEngineConfig, LMCacheEngineMetadata  # noqa: E402

_create = cache_engine.CreateStorageBackend
cache_engine.CreateStorageBackend = lambda config, metadata: _create(config, metadata, "cpu")


def main() -> None:
    layers, tokens, heads, head_size, chunk = map(int, sys.argv[1:])
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=chunk, local_device="cpu", max_local_cache_size=1, remote_url=None, remote_serde=None
    )
    shape = (layers, 2, chunk, heads, head_size)
    metadata = LMCacheEngineMetadata("model", 1, 0, "vllm", torch.float16, shape)
    engine = cache_engine.LMCacheEngine(config, metadata)
    ids = torch.arange(tokens)
    kv = tuple(
        (torch.randn(tokens, heads, head_size).half(), torch.randn(tokens, heads, head_size).half())
        for _ in range(layers)
    )
    for _ in sys.stdin:
        ids = ids + tokens
        start = time.perf_counter()
        engine.store(ids, kv)
        stored = time.perf_counter()
        got, mask = engine.retrieve(ids)
        end = time.perf_counter()
        if not mask.all() or not torch.equal(got[0][0], kv[0][0]):
            raise SystemExit("the peer did not return what was stored")
        del got
        print(json.dumps({"store": stored - start, "retrieve": end - stored}), flush=True)
    os._exit(0)  # the package's workers never end


if __name__ == "__main__":
    main()
