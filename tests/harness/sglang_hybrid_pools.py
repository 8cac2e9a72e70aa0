"""SGLang's host pools of models with windows, states or an indexer, without an engine.

Engines of such models may need a GPU, but their host pools do not. Tests drive a storage backend with these
pools, in a program with SGLang's modules (``testing.sglang.program``). As a program, this module stores and
loads pages with SGLang's own backend ``file``, and prints outcomes as JSON.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

PAGE_TOKENS = 64  # the only page size of the indexer
NUM_PAGES = 8
NUM_LAYERS = 3
LAYOUTS = "page_first_direct", "page_first", "layer_first"
"""Orders of a page's parts in memory. A pool of states has no ``layer_first``."""


def windowed(layout: str) -> dict[str, Any]:
    """Return pools of a model in which some layers have a sliding window. The two pools differ in size."""
    return {"kv": _keys_and_values(layout, 1), "swa": _keys_and_values(layout, NUM_LAYERS)}


def stateful(layout: str) -> dict[str, Any]:
    """Return pools of a model with states: recurrent ones of float32, and two convolutions of bfloat16."""
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    on_device = MambaStateBufferInfo(
        temporal=torch.zeros(NUM_LAYERS, NUM_PAGES, 4, 8, 8),
        conv=tuple(torch.zeros(NUM_LAYERS, NUM_PAGES, size, 3, dtype=torch.bfloat16) for size in (24, 5)),
    )
    states = MambaPoolHost(on_device, 2.0, 0, device_capacity=NUM_PAGES, layout=layout)
    return {"kv": _keys_and_values(layout, 1), "mamba": states}


def indexed(layout: str) -> dict[str, Any]:
    """Return pools of a model with latents and the index of sparse attention, which one layer lacks."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    rank, rope = 32, 16
    on_device = DSATokenToKVPool(
        size=NUM_PAGES * PAGE_TOKENS,
        page_size=PAGE_TOKENS,
        dtype=torch.bfloat16,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        layer_num=NUM_LAYERS,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=rank + rope,
        index_buf_size=NUM_PAGES * PAGE_TOKENS,
        skip_topk_layers=[False, True, False],
    )
    options = {"start_layer": 0, "end_layer": NUM_LAYERS, "target_layer_num": NUM_LAYERS}
    info = on_device.get_device_pool_infos()[0].buffer_info
    latents = MLATokenToKVPoolHost(
        info, 2.0, 0, PAGE_TOKENS, layout, device_capacity_tokens=on_device.size, **options
    )
    return {"kv": latents, "indexer": DSAIndexerPoolHost(make_dsa_indexer_pool_decl(on_device), latents)}


MODELS = {"windowed": windowed, "stateful": stateful, "indexed": indexed}


def register(backend: Any, pools: dict[str, Any]) -> None:
    """Give the pools to a storage backend, in SGLang's order."""
    from sglang.srt.mem_cache.hicache_storage import PoolName

    backend.register_mem_pool_host(pools["kv"])
    for name, pool in pools.items():
        backend.register_mem_host_pool_v2(pool, PoolName(name))
    backend.on_host_pools_registered()


def transfer(pools: dict[str, Any], name: str, keys: Sequence[str], pages: Sequence[int]) -> Any:
    """Return the description of a transfer. Page number ``pages[i]`` of the pool has the key ``keys[i]``.

    A page of a pool of states is a state. The pools ``swa`` and ``mamba`` need only the last pages of a hit.
    """
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    size = pools[name].page_size
    indices = torch.tensor([page * size + token for page in pages for token in range(size)])
    is_trailing = name in ("swa", "mamba")
    policy = PoolHitPolicy.TRAILING_PAGES if is_trailing else PoolHitPolicy.ALL_PAGES
    return PoolTransfer(name=PoolName(name), host_indices=indices, keys=list(keys), hit_policy=policy)


def contents(pool: Any) -> list[bytes]:
    """Return the bytes of all pages."""
    return [_flat(pool, page).numpy().tobytes() for page in range(pool.page_num)]


def fill(pool: Any, generator: torch.Generator) -> None:
    """Fill all pages with random bytes."""
    for page in range(pool.page_num):
        flat = pool.get_data_page(page * pool.page_size, flat=True)
        content = torch.randint(0, 256, _flat(pool, page).shape, dtype=torch.uint8, generator=generator)
        pool.set_from_flat_data_page(page * pool.page_size, content.view(flat.dtype))


def outcome(pools: dict[str, Any], backend: Any, generator: torch.Generator) -> dict[str, bool]:
    """Store pages of each pool, fill the pool again, and load the pages to other places of the pool.

    Returns for each pool whether these pages have their first contents, and all others their second ones.
    """
    keys, stored, loaded = ["a", "b", "c"], [3, 0, 5], [1, 4, 2]
    register(backend, pools)
    outcomes = {}
    for name, pool in pools.items():
        fill(pool, generator)
        first = contents(pool)
        num_stored = sum(backend.batch_set_v2([transfer(pools, name, keys, stored)])[name])
        fill(pool, generator)
        expected = contents(pool)
        for start, end in zip(stored, loaded, strict=True):
            expected[end] = first[start]
        num_loaded = sum(backend.batch_get_v2([transfer(pools, name, keys, loaded)])[name])
        is_equal = contents(pool) == expected
        outcomes[name] = num_stored == num_loaded == len(keys) and is_equal
    return outcomes


def _keys_and_values(layout: str, num_layers: int) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    on_device = MHATokenToKVPool(
        size=NUM_PAGES * PAGE_TOKENS,
        page_size=PAGE_TOKENS,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=16,
        layer_num=num_layers,
        device="cpu",
        enable_memory_saver=False,
    )
    options = {"device_capacity_tokens": on_device.size, "start_layer": 0, "end_layer": num_layers}
    info = on_device.get_device_pool_infos()[0].buffer_info
    return MHATokenToKVPoolHost(info, 2.0, 0, PAGE_TOKENS, layout, **options)


def _flat(pool: Any, page: int) -> torch.Tensor:
    content: torch.Tensor = pool.get_data_page(page * pool.page_size, flat=True)
    return content.contiguous().view(torch.uint8)


def main(folder: str) -> None:
    """Print the outcome of each model and layout with SGLang's backend ``file`` in a folder."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

    generator = torch.Generator().manual_seed(0)
    outcomes = {}
    for model, layout in ((model, layout) for model in MODELS for layout in LAYOUTS):
        if (model, layout) == ("stateful", "layer_first"):
            continue
        name = f"{model}-{layout}"
        config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, model == "indexed", False, False, name)
        backend = HiCacheFile(config, f"{folder}/{name}")
        outcomes[name] = outcome(MODELS[model](layout), backend, generator)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    import sglang_models_on_cpu
    import sglang_on_cpu

    sglang_on_cpu.register()
    sglang_models_on_cpu.register()
    main(sys.argv[1])
