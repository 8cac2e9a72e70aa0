"""CacheBlend (Yao et al., EuroSys 2025): recompute only a few selected tokens of retrieved KV.

Up to the layer that selects tokens, K and V are computed for all tokens. In later layers they are computed
for the selected tokens only. All other tokens use the retrieved K and V. Their K is rotated from the position
at which it was stored to its position in the prompt.
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
from lmcache_client.blend.selection import tokens_to_compute

logger = init_logger(__name__)

PositionalEncoder = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""``(positions, q, k) -> (q, k)``: rotates Q and K; may work in place."""


class CacheBlendImpl(BlendExecutor):
    """Blends one batch at a time; reusable for further batches."""

    def __init__(
        self,
        recompute_ratio: float,
        all_reduce_function: Callable[[torch.Tensor], torch.Tensor] | None = None,
        selection: Selection | None = None,
        in_place: bool = False,
        k_is_placed: bool = False,
    ) -> None:
        """Set how tokens are selected and how the retrieved tensors are used.

        By default, the executor recomputes the share ``recompute_ratio`` (0 to 1) of each request's valid
        tokens: those whose V deviates most. ``selection`` replaces this rule.

        ``all_reduce_function`` sums a tensor over the ranks that share the KV heads, so that all ranks select
        the same tokens. With ``in_place``, the executor may overwrite the retrieved tensors. With
        ``k_is_placed``, retrieved K is already rotated to its position in the prompt.

        Raises ValueError if the ratio is out of range.
        """
        self.selection = selection or LargestDeviation(recompute_ratio)
        self.recompute_ratio = recompute_ratio
        self.all_reduce_function = all_reduce_function
        self.in_place = in_place
        self.k_is_placed = k_is_placed
        self.positional_encoder: PositionalEncoder | None = None
        self.reverse_positional_encoder: PositionalEncoder | None = None
        self.indexes_in_kv = torch.empty(0, dtype=torch.long)
        """Selected tokens of the batch, in ascending order."""
        self._has_selected = False
        self._attention: torch.Tensor | None = None

    def set_positional_encoder(self, positional_encoder: PositionalEncoder) -> None:
        """Set the function that rotates Q and K to given positions."""
        self.positional_encoder = positional_encoder

    def set_reverse_positional_encoder(self, reverse_positional_encoder: PositionalEncoder) -> None:
        """Set the function that undoes the rotation of ``set_positional_encoder``."""
        self.reverse_positional_encoder = reverse_positional_encoder

    def begin(
        self,
        valid_mask: torch.Tensor,
        original_positions: torch.Tensor,
        query_start_loc: torch.Tensor,
        attention: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Select tokens before the first layer, and return them.

        The engine then computes nothing for the other tokens. Returns None if the selection compares V at a
        layer; ``blend`` then selects at that layer. The call is optional: without it, ``blend`` selects in
        layer 0. ``Candidates`` describes ``attention``.
        """
        self._attention = attention
        self._has_selected = self.selection.layer == BEFORE_LAYERS
        if not self._has_selected:
            return None
        device = original_positions.device
        self._select(Candidates(*_on(device, valid_mask, original_positions, query_start_loc)))
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
        """Blend one layer; ``BlendExecutor.blend`` describes the arguments.

        Does not change the given tensors, unless ``in_place`` is set. If nothing was retrieved (K and V are
        None), all tokens are computed.

        Raises AssertionError if ``valid_mask`` is not on the CPU, if ``query_start_loc`` does not cover the
        retrieved tokens, or if the tokens after the selecting layer are not the selected ones.
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
        if layer_id == selecting and not self._has_selected:
            tokens = Candidates(*_on(fresh_v.device, valid_mask, original_positions, query_start_loc))
            is_selected = self._select_at_layer(tokens, retrieved_v, fresh_v, token_dim)
            short_start_loc = pad(is_selected.cumsum(0), (1, 0))[tokens.query_start_loc].to(query_start_loc)
            q = fresh_q.index_select(token_dim, self.indexes_in_kv)
            positions = positions[self.indexes_in_kv.to(positions.device)]
            return BlendOutput(q, fresh_k, fresh_v, positions, self.indexes_in_kv, short_start_loc)
        if layer_id > selecting or self._has_selected:
            assert fresh_k.shape[token_dim] == len(self.indexes_in_kv), "fresh K does not match the selection"
            retrieved_k = self._writable(retrieved_k, fresh_k)
            retrieved_v = self._writable(retrieved_v, fresh_v)
            retrieved_k = self._rotate(retrieved_k, original_positions, query_start_loc)
            fresh_k = retrieved_k.index_copy_(token_dim, self.indexes_in_kv, fresh_k)
            fresh_v = retrieved_v.index_copy_(token_dim, self.indexes_in_kv, fresh_v)
        all_indices = torch.arange(fresh_q.shape[token_dim], device=fresh_q.device)
        return BlendOutput(fresh_q, fresh_k, fresh_v, positions, all_indices, None)

    def _select_at_layer(
        self, tokens: Candidates, retrieved_v: torch.Tensor, fresh_v: torch.Tensor, token_dim: int
    ) -> torch.Tensor:
        """Select tokens, by the deviation of V at this layer if the selection uses it; return a bool mask."""
        if self.selection.layer != BEFORE_LAYERS:
            retrieved_v = retrieved_v.to(fresh_v.device)
            deviation = self._deviation(retrieved_v, fresh_v, tokens.is_valid, token_dim)
            tokens = replace(tokens, deviation=deviation)
        return self._select(tokens)

    def _select(self, tokens: Candidates) -> torch.Tensor:
        is_selected = tokens_to_compute(self.selection, replace(tokens, attention=self._attention))
        self.indexes_in_kv = is_selected.nonzero().squeeze(1)
        return is_selected

    def _writable(self, retrieved: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
        """Return ``retrieved`` with the device and dtype of ``fresh``, as a tensor that may be changed."""
        converted = retrieved.to(fresh)
        return converted.clone() if converted is retrieved and not self.in_place else converted

    def _deviation(
        self, retrieved_v: torch.Tensor, fresh_v: torch.Tensor, valid: torch.Tensor, token_dim: int
    ) -> torch.Tensor:
        """Return each token's mean squared difference, float32; 0 where the token is not valid."""
        other_dims = [dim for dim in range(fresh_v.dim()) if dim != token_dim]
        difference = (fresh_v.float() - retrieved_v.float()).square().mean(other_dims)
        difference = difference.where(valid, 0)  # a product with the mask would keep NaN
        return self.all_reduce_function(difference) if self.all_reduce_function else difference

    def _rotate(
        self, k: torch.Tensor, original_positions: torch.Tensor, query_start_loc: torch.Tensor
    ) -> torch.Tensor:
        """Return K rotated to the positions of its tokens in their requests; may return ``k`` itself."""
        if self.k_is_placed:
            return k
        if self.positional_encoder is None or self.reverse_positional_encoder is None:
            _warn_of_missing_encoders()
            return k
        all_valid = torch.ones(len(original_positions), dtype=torch.bool)
        tokens = Candidates(*_on(k.device, all_valid, original_positions, query_start_loc))
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
    """Return the first three fields of Candidates, on one device."""
    is_valid, positions = valid_mask.bool().to(device), original_positions.to(device, torch.long)
    return is_valid, positions, query_start_loc.to(device, torch.long)


def _undefined(like: torch.Tensor, num_tokens: int, token_dim: int) -> torch.Tensor:
    """Return uninitialized K or V for tokens without retrieved KV."""
    shape = list(like.shape)
    shape[token_dim] = num_tokens
    return like.new_empty(shape)


@cache
def _warn_of_missing_encoders() -> None:
    """Log the warning once per process, not once per layer."""
    logger.warning("K is reused at its stored positions: set both positional encoders to rotate it")
