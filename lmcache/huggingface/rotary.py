"""Moves K to other positions, by rotations like those of transformers' rotary embeddings."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary types, by transformers' names, whose frequencies don't depend on the length of the prompt."""
_SERIAL_NUMBERS = 1 << 15
"""Largest piece, in numbers, that torch processes with one thread on a CPU (its ``GRAIN_SIZE``). Several
threads for each piece cost more than they save, and stall if one of their cores is busy."""


class RotaryShift:
    """Rotates K in place, from its position p to position p + shift.

    One rotation by the difference of positions replaces a rotation back and one forward. It is computed in
    float32, because in half precision the angle of a far position would lose digits.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ValueError if the type of the model's rotary embedding is not supported."""
        decoder = model.get_decoder()
        rotary = getattr(decoder, "rotary_emb", None)
        rope_type = getattr(rotary, "rope_type", None)
        if rotary is None or rope_type not in _ROPE_TYPES:
            raise ValueError(f"its rotary embedding is {rope_type}, not one of {', '.join(_ROPE_TYPES)}")
        self._frequencies: torch.Tensor = rotary.inv_freq.float()
        self._is_rotated = [getattr(layer.self_attn, "use_rope", True) for layer in decoder.layers]

    def __call__(self, k: torch.Tensor, shift: int, layer_id: int) -> None:
        """Rotate ``k`` ``[..., num_tokens, head_size]`` of one layer. The halves of a head form the pairs."""
        if not self._is_rotated[layer_id]:
            return
        angles = (self._frequencies * shift).to(k.device)
        wide = torch.float64 if k.dtype == torch.float64 else torch.float32
        cos, sin = angles.cos().to(wide), angles.sin().to(wide)
        num_tokens = k.shape[-2]
        step = num_tokens if k.is_cuda else max(1, _SERIAL_NUMBERS * num_tokens // k.numel())
        for start in range(0, num_tokens, step):
            part = k[..., start : start + step, :]
            first, second = part[..., : len(angles)], part[..., len(angles) : 2 * len(angles)]
            if k.dtype in (torch.float32, torch.float64):
                turned = first * sin
                first.mul_(cos).addcmul_(second, sin, value=-1)
                second.mul_(cos).add_(turned)
            else:
                precise = first.float(), second.float()
                first.copy_(precise[0] * cos - precise[1] * sin)
                second.copy_(precise[1] * cos + precise[0] * sin)
