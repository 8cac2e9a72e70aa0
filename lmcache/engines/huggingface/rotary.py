"""Rotating K by a difference of positions, as transformers' rotary embeddings rotate it to a position."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose frequencies are the same whatever the length of the prompt is (transformers' names)."""
_SERIAL_NUMBERS = 1 << 15
"""In pieces below this size torch works in one thread on the CPU (its ``GRAIN_SIZE``), and in its caches. A
team of threads for every piece costs more than it saves, and stalls as soon as one of its cores is taken."""


class RotaryShift:
    """Rotates K in place; what was rotated to p is then as if it had been rotated to p + shift.

    Rotations to a position and by a difference are of the same kind, so that one rotation by the difference
    takes the place of one back and one forth. It is done in float32: in half precision the angle of a far
    position would lose digits.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ValueError when the model's rotary embedding is none that is known here."""
        decoder = model.get_decoder()
        rotary = getattr(decoder, "rotary_emb", None)
        rope_type = getattr(rotary, "rope_type", None)
        if rotary is None or rope_type not in _ROPE_TYPES:
            raise ValueError(f"its rotary embedding is {rope_type}, not one of {', '.join(_ROPE_TYPES)}")
        self._frequencies: torch.Tensor = rotary.inv_freq.float()
        self._is_rotated = [getattr(layer.self_attn, "use_rope", True) for layer in decoder.layers]

    def __call__(self, k: torch.Tensor, shift: int, layer_id: int) -> None:
        """Rotate ``k`` ``[..., head_size]`` of one layer, pairs being the two halves of the head."""
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
