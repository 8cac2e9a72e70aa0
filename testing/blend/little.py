"""The small model in the format of Hugging Face, for engines whose attention needs heads of 32 or more.

Its heads have 16 dimensions. They are widened to 32 with zeros, so that the model computes the same function.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from testing.blend.train import CONFIG, WEIGHTS_FILE, trained_model
from testing.engine.tiny_model import cached_model

WIDTH = 32


def little_model() -> Path:
    """Return the model's directory. Generates the model if it is missing (1 s)."""
    return cached_model("little", _save, Path(__file__), WEIGHTS_FILE)


def widened() -> LlamaForCausalLM:
    """Return the trained model with heads of ``WIDTH`` dimensions."""
    model = trained_model()
    heads, hidden = CONFIG.num_attention_heads, CONFIG.hidden_size
    narrow = hidden // heads
    factor = WIDTH // narrow
    # Dimension i of each half rotates as fast as dimension factor * i of a wide half.
    places = torch.cat([torch.arange(0, WIDTH // 2, factor), torch.arange(WIDTH // 2, WIDTH, factor)])
    state = model.state_dict()
    for name, weights in list(state.items()):
        kind = name.split(".")[-2]
        if kind in ("q_proj", "k_proj", "v_proj"):
            wide = torch.zeros(heads, WIDTH, hidden)
            # Attention divides by the root of the dimensions.
            scale = factor**0.5 if kind == "q_proj" else 1
            wide[:, places] = scale * weights.view(heads, narrow, hidden)
            state[name] = wide.view(heads * WIDTH, hidden)
        elif kind == "o_proj":
            wide = torch.zeros(hidden, heads, WIDTH)
            wide[:, :, places] = weights.view(hidden, heads, narrow)
            state[name] = wide.view(hidden, heads * WIDTH)
    config = LlamaConfig(**{**CONFIG.to_diff_dict(), "head_dim": WIDTH})
    wide_model = LlamaForCausalLM(config)
    wide_model.load_state_dict(state)
    return wide_model.eval()


def _save(target: Path) -> None:
    widened().save_pretrained(target)
