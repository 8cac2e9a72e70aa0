"""A transformers model of a given shape with random weights, on the GPU if there is one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu.scale import Shape
from lmcache.config import LMCacheEngineConfig

T = TypeVar("T")


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def random_model(shape: Shape, max_tokens: int) -> Any:
    """Return a model in bfloat16, whose answers don't end early. ``max_tokens`` limits its prompts."""
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=max_tokens,
        rope_theta=500000.0,
        attn_implementation="sdpa",
        pad_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device()):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Run ``work`` to its end on the GPU. Returns milliseconds and its result."""
    _synchronize()
    began_at = time.perf_counter()
    result = work()
    _synchronize()
    return (time.perf_counter() - began_at) * 1e3, result


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def configuration(place: str, chunk_tokens: int, gib: float, **options: Any) -> LMCacheEngineConfig:
    """Return a configuration of the library whose chunks are in ``place``: ``cpu`` or ``cuda``."""
    return LMCacheEngineConfig.from_defaults(
        chunk_size=chunk_tokens,
        local_device=place,
        max_local_cache_size=gib,
        remote_url=None,
        remote_serde=None,
        **options,
    )
