"""Times the engine of lmcache 0.3.0: on every line of input, one store and one retrieve of the same KV.

Runs in that package's own environment, on a machine without a GPU. What it would ask of CUDA is taken away,
in its favour: no pinning, results stay in host memory, and the extension of its CacheGen codec, which is not
used here, is empty. Every round has other tokens: to store the same again is a KeyError there.
"""

from __future__ import annotations

import json
import os
import sys
import time
import types

os.environ["LMCACHE_TRACK_USAGE"] = "false"  # it phones home otherwise
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
    os._exit(0)  # its workers never end


if __name__ == "__main__":
    main()
