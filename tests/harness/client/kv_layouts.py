"""KV as engines allocate it: one allocation in any physical order, viewed as ``[B, H, N, C]`` per layer."""

import torch

L, B, H, N, C = 3, 5, 2, 4, 8
ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
}


def kv_caches(order, dtype=torch.float16):
    """One allocation, viewed as ``[B, H, N, C]`` per layer, as vLLM makes it."""
    sizes = (L, B, H, N, C)
    backing = torch.arange(L * B * H * N * C, dtype=torch.int32).to(dtype).view([sizes[d] for d in order])
    logical = backing.permute([order.index(d) for d in range(5)])
    return {f"layer{i}": logical[i] for i in range(L)}
