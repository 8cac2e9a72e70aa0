"""LoRA adapters of the tiny Llama."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

from testing.engine.tiny_model import tiny_model


def save_adapter(folder: Path, seed: int) -> Path:
    """Write a LoRA adapter of the tiny Llama with random weights. Returns its folder."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((tiny_model() / "config.json").read_text())
    hidden = config["hidden_size"]
    sizes = {"q_proj": hidden, "v_proj": config["num_key_value_heads"] * config["head_dim"]}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer, (name, size) in itertools.product(range(config["num_hidden_layers"]), sizes.items()):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        weights[f"{prefix}.lora_A.weight"] = torch.randn(8, hidden, generator=generator) * 0.1
        weights[f"{prefix}.lora_B.weight"] = torch.randn(size, 8, generator=generator) * 0.1
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": list(sizes), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    # An engine shares no KV of files that may have changed since it started.
    time.sleep(0.1)  # real time: it knows its start time only to a hundredth of a second
    return folder
