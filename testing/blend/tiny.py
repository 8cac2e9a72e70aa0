"""Tiny models with random weights, one for each family, and engines for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lmcache.cache_engine import LMCacheEngine
from lmcache.config import LMCacheEngineConfig
from lmcache.huggingface import metadata_of

BOS = 1
CHUNK = 16
VOCAB_SIZE = 300
WINDOW = 512
WEIGHTS_STD = 0.2  # so that answers depend on the prompt


def tiny_model(family: str, attention: str = "sdpa", **options: Any) -> PreTrainedModel:
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": WINDOW,
        "bos_token_id": BOS,
        "eos_token_id": None,
        "pad_token_id": None,
        **({"sliding_window": None} if family == "mistral" else {}),
        **options,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **sizes), attn_implementation=attention
    ).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:  # not the scales of norms
            torch.nn.init.normal_(parameter, std=WEIGHTS_STD)
    return model


@contextlib.contextmanager
def engine_for(model: PreTrainedModel, **options: Any) -> Iterator[LMCacheEngine]:
    """An engine in memory that blends prompts of any length."""
    defaults = {
        "chunk_size": CHUNK,
        "local_device": "cpu",
        "remote_url": None,
        "remote_serde": None,
        "max_local_cache_size": 0.05,
        "enable_blending": True,
        "blend_min_tokens": 0,
    }
    config = LMCacheEngineConfig.from_defaults(**{**defaults, **options})
    engine = LMCacheEngine(config, metadata_of(model, "tiny", config.chunk_size))
    try:
        yield engine
    finally:
        engine.close()


def random_tokens(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(BOS + 1, VOCAB_SIZE, (length,), generator=generator) for length in lengths]
