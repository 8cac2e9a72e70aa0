"""Rotations of K from the positions at which it was computed to its positions in a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

_SERIAL_NUMBERS = 1 << 15
"""Largest piece, in numbers, that torch processes with one thread on a CPU (its ``GRAIN_SIZE``). Several
threads for each piece cost more than they save, and stall if one of their cores is busy."""


class Angles(NamedTuple):
    """Angles by which K is rotated, the same for all heads and for all layers of one rotary embedding."""

    cos: torch.Tensor
    """``[num_tokens, num_pairs]``, or ``[1, num_pairs]`` if all tokens have the same angles."""
    sin: torch.Tensor
    """Like ``cos``."""
    is_neox_style: bool = True
    """Whether number i of the first half forms a pair with number i of the second half. Otherwise, successive
    numbers form pairs."""

    def rotate(self, k: torch.Tensor) -> None:
        """Rotate ``k`` ``[num_tokens, ..., head_size]`` in place. Numbers behind the last pair do not change.

        The arithmetic is in float32, or in float64 for such K. In half precision the angle of a far position
        would lose digits.
        """
        num_tokens, num_pairs = len(k), self.cos.shape[-1]
        if k.shape[-1] < 2 * num_pairs or not k.is_floating_point():
            raise ValueError(f"cannot rotate {num_pairs} pairs in K of {k.dtype} {list(k.shape)}")
        if not k.numel():
            return
        wide = torch.promote_types(k.dtype, torch.float32)
        shape = num_tokens, *[1] * (k.dim() - 2), num_pairs
        cos, sin = (x.to(k.device, wide).expand(num_tokens, -1).view(shape) for x in (self.cos, self.sin))
        step = max(1, _SERIAL_NUMBERS * num_tokens // k.numel()) if k.is_cpu else num_tokens
        for start in range(0, num_tokens, step):
            piece = slice(start, start + step)
            part = k[piece, ..., : 2 * num_pairs]
            first, second = part.chunk(2, -1) if self.is_neox_style else (part[..., ::2], part[..., 1::2])
            _rotate(first, second, cos[piece], sin[piece])


@dataclass(frozen=True, eq=False)  # tensors have no single truth value
class Rotation:
    """A rotary embedding, by the table of cosines and sines with which the model rotates Q and K."""

    table: torch.Tensor
    """``[num_positions, 2 * num_pairs]``: the cosines of all pairs, then their sines."""
    is_neox_style: bool
    """See ``Angles``."""

    @classmethod
    def from_table(cls, table: torch.Tensor, rotary_dim: int, is_neox_style: bool) -> Rotation:
        """Return the rotation of the first ``rotary_dim`` numbers of each head.

        Raises ValueError, with the reason, for a table that is not ``[num_positions, rotary_dim]``.
        """
        if (
            table.dim() != 2
            or table.shape[1] != rotary_dim
            or rotary_dim % 2
            or not table.is_floating_point()
        ):
            given = f"{table.dtype} {list(table.shape)}"
            raise ValueError(f"its rotary table is {given}, not cosines and sines [positions, {rotary_dim}]")
        return cls(table, is_neox_style)

    def angles(self, old: torch.Tensor, new: torch.Tensor) -> Angles:
        """Return the angles from the positions ``old`` to the positions ``new``, int64 ``[num_tokens]``.

        The table's entry for a position and a pair is a complex number, by which the model multiplies. The
        result is the entry at ``new`` divided by the entry at ``old``. So it is exact also for entries that
        are rounded, or that contain a factor such as YaRN's.

        Raises ValueError for a position outside the table. On a GPU, such an index would end the process.
        """
        for positions in (old, new):
            lowest, highest = (int(x) for x in positions.aminmax()) if len(positions) else (0, 0)
            if lowest < 0 or highest >= len(self.table):
                given = f"positions {lowest} to {highest}"
                raise ValueError(f"cannot rotate K: its rotary table of {len(self.table)} lacks {given}")
        (cos, sin), (new_cos, new_sin) = (
            self.table[positions.to(self.table.device)].float().chunk(2, -1) for positions in (old, new)
        )
        square = cos * cos + sin * sin
        quotient = (new_cos * cos + new_sin * sin) / square, (new_sin * cos - new_cos * sin) / square
        return Angles(*quotient, self.is_neox_style)


def _rotate(first: torch.Tensor, second: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate pairs in place, given the first and the second number of each."""
    if first.dtype == cos.dtype:
        turned = first * sin
        first.mul_(cos).addcmul_(second, sin, value=-1)
        second.mul_(cos).add_(turned)
    else:
        precise = first.to(cos.dtype), second.to(cos.dtype)
        first.copy_(precise[0] * cos - precise[1] * sin)
        second.copy_(precise[1] * cos + precise[0] * sin)
