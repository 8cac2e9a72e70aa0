"""The engine's model and its rotary embeddings, found from its attention layers."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

from torch import nn

from lmcache_client.blend.rotation import Rotation
from lmcache_client.errors import UnsupportedError


def find_model(layers: Mapping[str, Any]) -> Any:
    """Return the model that contains the attention layers. vLLM has no hook that gives it to a connector.

    The engine later hides its objects from the garbage collector, so call it before the first request.
    Raises UnsupportedError unless exactly one model contains all layers.
    """
    wanted = {id(layer) for layer in layers.values()}
    models = [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), nn.Module) and hasattr(type(thing), "compute_logits")
    ]
    parts = {id(model): {id(part) for part in model.modules()} - {id(model)} for model in models}
    owners = [model for model in models if wanted <= parts[id(model)]]
    outermost = [model for model in owners if not any(id(model) in parts[id(other)] for other in owners)]
    if len(outermost) != 1:
        raise UnsupportedError(
            f"{len(outermost)} models contain all layers of the KV; start vLLM without a draft model"
            " (--speculative-config) to blend"
        )
    return outermost[0]


def find_rotations(model: Any, layers: Mapping[str, Any]) -> dict[str, Rotation]:
    """Return the rotations of the attention layers whose rotary embedding has one table of angles."""
    names = {id(layer): name for name, layer in layers.items()}
    rotations: dict[int, Rotation] = {}
    found: dict[str, Rotation] = {}
    for module in model.modules():
        rotary = getattr(module, "rotary_emb", None)
        children = [names[id(child)] for child in module.children() if id(child) in names]
        table = getattr(rotary, "cos_sin_cache", None)
        if not children or rotary is None or table is None:
            continue
        if id(rotary) not in rotations:
            try:
                rotations[id(rotary)] = Rotation.from_table(table, rotary.rotary_dim, rotary.is_neox_style)
            except ValueError:
                continue
        found |= dict.fromkeys(children, rotations[id(rotary)])
    return found
