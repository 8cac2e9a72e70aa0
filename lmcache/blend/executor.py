"""CacheBlend (Yao et al., EuroSys 2025): of retrieved KV, recompute only a few selected tokens.

K and V of the layers up to the one at which tokens are selected are computed for all of them; from there on
only for the selected ones. The others' K and V are the retrieved ones, K rotated from the position it was
stored at to the one it has now.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch.nn.functional import pad

from lmcache.blend.interfaces import BlendExecutor, BlendOutput
from lmcache.blend.selection import BEFORE_LAYERS, Candidates, LargestDeviation, Selection
from lmcache.logging import init_logger

logger = init_logger(__name__)

PositionalEncoder = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""``(positions, q, k) -> (q, k)``; may work in place."""


class CacheBlendImpl(BlendExecutor):
    """Blends one batch; it can be used again for the next one."""

    def __init__(
        self,
        recompute_ratio: float,
        all_reduce_function: Callable[[torch.Tensor], torch.Tensor] | None = None,
        selection: Selection | None = None,
        in_place: bool = False,
        k_is_placed: bool = False,
    ) -> None:
        """Compute ``recompute_ratio`` (0 to 1) of each request's valid tokens again: those of the largest
        deviation, or what ``selection`` says instead.

        ``all_reduce_function`` sums a tensor over the ranks that share the KV heads, so that all select the
        same tokens. ``in_place``: the retrieved tensors are given away, and become the blended ones.
        ``k_is_placed``: retrieved K stands rotated to where its tokens are now. Raises ValueError for a ratio
        out of range.
        """
        self.selection = selection or LargestDeviation(recompute_ratio)
        self.recompute_ratio = recompute_ratio
        self.all_reduce_function = all_reduce_function
        self.in_place = in_place
        self.k_is_placed = k_is_placed
        self.positional_encoder: PositionalEncoder | None = None
        self.reverse_positional_encoder: PositionalEncoder | None = None
        self.indexes_in_kv = torch.empty(0, dtype=torch.long)
        """Which tokens of the batch are selected, in rising order."""
        self._has_begun = False
        self._attention: torch.Tensor | None = None

    def set_positional_encoder(self, positional_encoder: PositionalEncoder) -> None:
        """Set how Q and K are rotated to positions."""
        self.positional_encoder = positional_encoder

    def set_reverse_positional_encoder(self, reverse_positional_encoder: PositionalEncoder) -> None:
        """Set how that rotation is undone."""
        self.reverse_positional_encoder = reverse_positional_encoder

    def begin(
        self,
        valid_mask: torch.Tensor,
        original_positions: torch.Tensor,
        query_start_loc: torch.Tensor,
        attention: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Select before the first layer, and return the tokens, so that nothing is computed for others.

        None when the selection has to see a layer: then ``blend`` selects there. Optional: without it a
        selection that needs no layer is made in layer 0. ``attention``: see ``Candidates``.
        """
        self._attention = attention
        self._has_begun = self.selection.layer == BEFORE_LAYERS
        if not self._has_begun:
            return None
        device = original_positions.device
        tokens = Candidates(*_on(device, valid_mask, original_positions, query_start_loc))
        self._keep(tokens)
        return self.indexes_in_kv

    def blend(
        self,
        layer_id: int,
        retrieved_k: torch.Tensor | None,
        retrieved_v: torch.Tensor | None,
        valid_mask: torch.Tensor,
        original_positions: torch.Tensor,
        fresh_q: torch.Tensor,
        fresh_k: torch.Tensor,
        fresh_v: torch.Tensor,
        positions: torch.Tensor,
        query_start_loc: torch.Tensor,
        token_dim: int,
    ) -> BlendOutput:
        """Blend one layer, as the interface says; the tensors given are not changed unless ``in_place``.

        With nothing retrieved (K and V None) no token is valid: all are computed.

        Raises AssertionError when ``valid_mask`` is not on the CPU, when ``query_start_loc`` does not cover
        the retrieved tokens, and when a layer above the selecting one does not bring the selected tokens.
        """
        assert valid_mask.is_cpu, "valid_mask should be on CPU"
        selecting = max(self.selection.layer, 0)
        if retrieved_k is None or retrieved_v is None:
            assert layer_id <= selecting or len(self.indexes_in_kv) == len(valid_mask), "K and V are missing"
            retrieved_k, retrieved_v = (_undefined(fresh_v, len(valid_mask), token_dim) for _ in range(2))
            valid_mask = torch.zeros_like(valid_mask)
        assert query_start_loc[-1] == retrieved_v.shape[token_dim], (
            "query_start_loc does not match the tokens"
        )
        if layer_id == selecting and not self._has_begun:
            tokens = Candidates(*_on(fresh_v.device, valid_mask, original_positions, query_start_loc))
            is_selected = self._select(tokens, retrieved_v, fresh_v, token_dim)
            short_start_loc = pad(is_selected.cumsum(0), (1, 0))[tokens.query_start_loc].to(query_start_loc)
            q = fresh_q.index_select(token_dim, self.indexes_in_kv)
            positions = positions[self.indexes_in_kv.to(positions.device)]
            return BlendOutput(q, fresh_k, fresh_v, positions, self.indexes_in_kv, short_start_loc)
        if layer_id > selecting or self._has_begun:
            assert fresh_k.shape[token_dim] == len(self.indexes_in_kv), "fresh K does not match the selection"
            retrieved_k, retrieved_v = self._given(retrieved_k, fresh_k), self._given(retrieved_v, fresh_v)
            retrieved_k = self._rotate(retrieved_k, original_positions, query_start_loc)
            fresh_k = retrieved_k.index_copy_(token_dim, self.indexes_in_kv, fresh_k)
            fresh_v = retrieved_v.index_copy_(token_dim, self.indexes_in_kv, fresh_v)
        everything = torch.arange(fresh_q.shape[token_dim], device=fresh_q.device)
        return BlendOutput(fresh_q, fresh_k, fresh_v, positions, everything, None)

    def _select(
        self, tokens: Candidates, retrieved_v: torch.Tensor, fresh_v: torch.Tensor, token_dim: int
    ) -> torch.Tensor:
        """Select by what this layer shows, if the selection wants to see it; return a bool mask."""
        if self.selection.layer != BEFORE_LAYERS:
            retrieved_v = retrieved_v.to(fresh_v.device)
            deviation = self._deviation(retrieved_v, fresh_v, tokens.is_valid, token_dim)
            tokens = replace(tokens, deviation=deviation)
        return self._keep(tokens)

    def _keep(self, tokens: Candidates) -> torch.Tensor:
        is_selected = self.selection.select(replace(tokens, attention=self._attention))
        if is_selected.dtype != torch.bool or is_selected.shape != tokens.is_valid.shape:
            kind = f"{is_selected.dtype} {list(is_selected.shape)}"
            raise ValueError(f"a selection must be a bool mask [{len(tokens.is_valid)}], not {kind}")
        is_selected = is_selected | ~tokens.is_valid
        if tokens.deviation is not None:
            is_selected |= tokens.deviation.isnan()  # a retrieved row that is no number
        self.indexes_in_kv = is_selected.nonzero().squeeze(1)
        return is_selected

    def _given(self, retrieved: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
        """Return a tensor like ``fresh`` that may be changed."""
        own = retrieved.to(fresh)
        return own.clone() if own is retrieved and not self.in_place else own

    def _deviation(
        self, retrieved_v: torch.Tensor, fresh_v: torch.Tensor, valid: torch.Tensor, token_dim: int
    ) -> torch.Tensor:
        """Return each token's mean squared difference, float32; 0 where the retrieved one is undefined."""
        others = [dim for dim in range(fresh_v.dim()) if dim != token_dim]
        difference = (fresh_v.float() - retrieved_v.float()).square().mean(others)
        difference = difference.where(valid, 0)  # a product with the mask would keep NaN
        return self.all_reduce_function(difference) if self.all_reduce_function else difference

    def _rotate(
        self, k: torch.Tensor, original_positions: torch.Tensor, query_start_loc: torch.Tensor
    ) -> torch.Tensor:
        """Return K at the positions that its tokens have now within their requests; may be ``k``."""
        if self.k_is_placed:
            return k
        if self.positional_encoder is None or self.reverse_positional_encoder is None:
            _warn_of_missing_encoders()
            return k
        everything = torch.ones(len(original_positions), dtype=torch.bool)
        tokens = Candidates(*_on(k.device, everything, original_positions, query_start_loc))
        unused_q = torch.zeros_like(k)
        old_positions = tokens.original_positions
        unused_q, k = self.reverse_positional_encoder(old_positions, unused_q, k)
        return self.positional_encoder(old_positions + tokens.shift, unused_q, k)[1]


def _on(
    device: torch.device,
    valid_mask: torch.Tensor,
    original_positions: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what Candidates are made of, on one device."""
    is_valid, positions = valid_mask.bool().to(device), original_positions.to(device, torch.long)
    return is_valid, positions, query_start_loc.to(device, torch.long)


def _undefined(like: torch.Tensor, num_tokens: int, token_dim: int) -> torch.Tensor:
    """Return the K or V of tokens of which nothing was retrieved."""
    shape = list(like.shape)
    shape[token_dim] = num_tokens
    return like.new_empty(shape)


@cache
def _warn_of_missing_encoders() -> None:
    """Say it once per process, not once per layer."""
    logger.warning("no positional encoders are set: K is reused at the positions it was stored at")
