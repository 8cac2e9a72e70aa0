"""Write a Llama with random weights: ``python -m benchmarks.gpu.engine.weights FOLDER SHAPE_JSON``.

The weights must be in files. If the engine made them (``load_format="dummy"``), no other process could use
its KV.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.gpu.scale import Shape

MAX_TOKENS = 65536
_DEVIATION = 0.03
_EMBEDDING_SCALE = 30.0
"""Larger embeddings make answers depend on the prompt."""
_THREADS = 4

Tensors = dict[str, torch.Tensor]


def write(folder: Path, shape: Shape) -> None:
    """Write configuration and weights. A file holds the weights of one layer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_configuration(shape)))
    with ThreadPoolExecutor(_THREADS) as threads:
        written = [
            threads.submit(save_file, tensors, folder / f"model-{number:05}.safetensors", {"format": "pt"})
            for number, tensors in enumerate(_layers(shape))
        ]
        for each in written:
            each.result()


def _configuration(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": shape.vocab,
        "max_position_embeddings": MAX_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
    }


def _layers(shape: Shape) -> Iterator[Tensors]:
    """Create the weights of each layer, and at last those outside the layers."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(0)

    def random(*size: int, scale: float = _DEVIATION) -> torch.Tensor:
        values = torch.randn(*size, generator=generator, device=device, dtype=torch.float32)
        return (values * scale).to(torch.bfloat16).cpu()

    def ones() -> torch.Tensor:
        return torch.ones(shape.hidden, dtype=torch.bfloat16)

    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    for number in range(shape.layers):
        weights = {
            "self_attn.q_proj": random(queries, shape.hidden),
            "self_attn.k_proj": random(keys, shape.hidden),
            "self_attn.v_proj": random(keys, shape.hidden),
            "self_attn.o_proj": random(shape.hidden, queries),
            "mlp.gate_proj": random(shape.mlp, shape.hidden),
            "mlp.up_proj": random(shape.mlp, shape.hidden),
            "mlp.down_proj": random(shape.hidden, shape.mlp),
            "input_layernorm": ones(),
            "post_attention_layernorm": ones(),
        }
        yield {f"model.layers.{number}.{name}.weight": tensor for name, tensor in weights.items()}
    yield {
        "model.embed_tokens.weight": random(shape.vocab, shape.hidden, scale=_DEVIATION * _EMBEDDING_SCALE),
        "model.norm.weight": ones(),
        "lm_head.weight": random(shape.vocab, shape.hidden),
    }


if __name__ == "__main__":
    write(Path(sys.argv[1]), Shape(**json.loads(sys.argv[2])))
