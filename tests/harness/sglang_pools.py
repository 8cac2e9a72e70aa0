"""A program with SGLang's modules: stores and loads pages of SGLang's pools, and prints outcomes as JSON."""

import json
from typing import Any

import sglang_on_cpu
import torch

PAGE, LAYERS, PAGES = 4, 3, 8
STORED, HOST, LOADED = [3, 0, 5], [1, 4, 2], [6, 7, 1]
"""Pages on the device that are stored, the host pages that get them, and device pages that get the host's."""
SCRUBBED = -1.0


def tokens_of(pages: list[int]) -> torch.Tensor:
    return torch.tensor([page * PAGE + token for page in pages for token in range(PAGE)])


def mha_pools(dtype: torch.dtype, layout: str) -> tuple[Any, Any]:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    device = MHATokenToKVPool(PAGES * PAGE, PAGE, dtype, 2, 8, LAYERS, "cpu", False)
    options = {"device_capacity_tokens": PAGES * PAGE, "start_layer": 0, "end_layer": LAYERS}
    return device, MHATokenToKVPoolHost(device._mha_buffer_info(), 2.0, 0, PAGE, layout, **options)


def mla_pools(dtype: torch.dtype, layout: str) -> tuple[Any, Any]:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    device = MLATokenToKVPool(PAGES * PAGE, PAGE, dtype, 16, 8, LAYERS, "cpu", False)
    options = {"device_capacity_tokens": PAGES * PAGE, "start_layer": 0, "end_layer": LAYERS}
    options["target_layer_num"] = LAYERS
    return device, MLATokenToKVPoolHost(device._mla_buffer_info(), 2.0, 0, PAGE, layout, **options)


def buffers(device: Any) -> list[list[torch.Tensor]]:
    """The device's KV: keys by layer and values by layer, or latents by layer."""
    return [device.kv_buffer] if hasattr(device, "kv_buffer") else [device.k_buffer, device.v_buffer]


def outcome(device: Any, host: Any) -> dict[str, Any]:
    """Store pages, scrub the device, load the pages to other places, and compare all bytes."""
    rows = [layer for part in buffers(device) for layer in part]
    for row in rows:
        row.copy_(torch.randn(row.shape))
    originals = [row.clone() for row in rows]
    host.kv_buffer.fill_(SCRUBBED)
    host.backup_from_device_all_layer(device, tokens_of(HOST), tokens_of(STORED), "direct")
    is_stored = [
        torch.equal(
            host.get_data_page(to * PAGE).flatten(),
            torch.cat([row[start * PAGE : (start + 1) * PAGE].flatten() for row in originals]),
        )
        for start, to in zip(STORED, HOST, strict=True)
    ]
    unused = [page for page in range(host.page_num) if page not in HOST]
    num_written = sum(bool((host.get_data_page(page * PAGE) != SCRUBBED).any()) for page in unused)
    for row in rows:
        row.fill_(SCRUBBED)
    for layer in range(LAYERS):
        host.load_to_device_per_layer(device, tokens_of(HOST), tokens_of(LOADED), layer, "direct")
    is_loaded = [
        torch.equal(row[tokens_of(LOADED)], original[tokens_of(STORED)])
        for row, original in zip(rows, originals, strict=True)
    ]
    untouched = [page for page in range(PAGES) if page not in LOADED]
    num_written += sum(bool((row[tokens_of(untouched)] != SCRUBBED).any()) for row in rows)
    return {
        "stored": is_stored,
        "loaded": is_loaded,
        "num_written_elsewhere": num_written,
        "is_page_locked": host.pin_memory,
    }


if __name__ == "__main__":
    sglang_on_cpu.register()
    torch.manual_seed(0)
    outcomes = {
        f"{name} {layout} {dtype}": outcome(*pools(getattr(torch, dtype), layout))
        for name, pools in (("mha", mha_pools), ("mla", mla_pools))
        for layout in ("page_first_direct", "layer_first")
        for dtype in ("float32", "bfloat16")
    }
    print(json.dumps(outcomes))
