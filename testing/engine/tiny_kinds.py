"""Random-weight models of a few MB, one for each kind of KV that vLLM or SGLang runs on a CPU.

They are generated into the cache directory, once for each content of this file and of ``tiny_model``. vLLM
0.32 requires head sizes of at least 32, and linear attention in bfloat16 with heads of 128. The last two
models are for SGLang.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testing.engine import tiny_model

WINDOW = 128
"""Tokens of sliding windows."""

_BASE: dict[str, Any] = {
    "vocab_size": tiny_model.VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": tiny_model.MAX_TOKENS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
}


@dataclass(frozen=True)
class TinyKind:
    """A model. ``make`` creates it with transformers."""

    make: Callable[[], Any]
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Engine arguments that this model needs in addition."""

    @property
    def path(self) -> Path:
        """The model's directory. Generates the model if it is missing (a few seconds)."""
        name = self.make.__name__.removeprefix("_")
        return tiny_model.cached_model(name, self._save, Path(__file__), Path(tiny_model.__file__))

    def _save(self, target: Path) -> None:
        import torch

        torch.manual_seed(0)
        self.make().float().save_pretrained(target)


def _gemma3() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    changes = {
        "num_hidden_layers": 6,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 32,
        "tie_word_embeddings": True,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    }
    return Gemma3ForCausalLM(Gemma3TextConfig(**_BASE | changes))


def _mistral() -> Any:
    """A model in which every layer has a sliding window."""
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**_BASE | {"sliding_window": WINDOW}))


def _gpt_oss() -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    changes = {
        "head_dim": 64,
        "sliding_window": WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    return GptOssForCausalLM(GptOssConfig(**_BASE | changes))


def _llama4() -> Any:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    changes = {
        "attention_chunk_size": 256,
        "intermediate_size_mlp": 256,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 5,
        "moe_layers": [],
        "no_rope_layers": [1, 1, 1, 0],
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
    }
    return Llama4ForCausalLM(Llama4TextConfig(**_BASE | changes))


def _deepseek2() -> Any:
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    changes = {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 3,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
    }
    base = {name: value for name, value in _BASE.items() if name != "head_dim"}
    return DeepseekV2ForCausalLM(DeepseekV2Config(**base | changes))


def _qwen3_next() -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    changes = {
        "head_dim": 64,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
    }
    return Qwen3NextForCausalLM(Qwen3NextConfig(**_BASE | changes))


def _mellum() -> Any:
    """A model whose windows have a pool of their own in SGLang, unlike those of Gemma 3."""
    from transformers import MellumConfig, MellumForCausalLM

    changes = {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "mlp_layer_types": ["dense"] * 4,
    }
    return MellumForCausalLM(MellumConfig(**_BASE | changes))


def _lfm2() -> Any:
    """A model whose state is that of short convolutions."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    changes = {
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
    }
    base = {name: value for name, value in _BASE.items() if name != "head_dim"}
    return Lfm2ForCausalLM(Lfm2Config(**base | changes))


def _mla_block_tokens() -> int:
    """Block size of the CPU's latent attention: 32 with AMX, otherwise 16."""
    cpuinfo = Path("/proc/cpuinfo")
    is_simulated_cpu = "LMCACHE_TEST_CPU" in os.environ  # ``make test-avx2``: without AMX
    return 32 if not is_simulated_cpu and cpuinfo.exists() and "amx_tile" in cpuinfo.read_text() else 16


GEMMA3 = TinyKind(_gemma3)
MISTRAL = TinyKind(_mistral)
GPT_OSS = TinyKind(_gpt_oss)
LLAMA4 = TinyKind(_llama4)
DEEPSEEK2 = TinyKind(_deepseek2, {"dtype": "bfloat16", "block_size": _mla_block_tokens()})
QWEN3_NEXT = TinyKind(
    _qwen3_next,
    # A block must be as large as a state: 640 tokens where vLLM keeps states in fp32 (AVX-512 with BF16),
    # otherwise 384. Blocks of 640 fit both, so the tests do not depend on the processor. States are cached
    # where steps end.
    {"dtype": "bfloat16", "block_size": 640, "max_num_batched_tokens": 640},
)
MELLUM = TinyKind(_mellum)
LFM2 = TinyKind(_lfm2)
