"""CacheBlend (Yao et al., EuroSys 2025): of retrieved KV, recompute only the tokens that deviate most.

The K and V of layers 0 and 1 are computed for all tokens. At layer 1 the retrieved V is compared with the
fresh one; from there on only the selected tokens are computed. The others' K and V are the retrieved
ones, K rotated from the position it was stored at to the one it has now.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch.nn.functional import pad

from lmcache.blend.interfaces import BlendExecutor, BlendOutput
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
    ) -> None:
        """Compute ``recompute_ratio`` (0 to 1) of each request's valid tokens again.

        ``all_reduce_function`` sums a tensor over the ranks that share the KV heads, so that all select the
        same tokens. Raises ValueError for a ratio out of range.
        """
        if not 0 <= recompute_ratio <= 1:
            raise ValueError(f"Invalid recompute_ratio: {recompute_ratio} (must be 0 to 1)")
        self.recompute_ratio = recompute_ratio
        self.all_reduce_function = all_reduce_function
        self.positional_encoder: PositionalEncoder | None = None
        self.reverse_positional_encoder: PositionalEncoder | None = None
        self.indexes_in_kv = torch.empty(0, dtype=torch.long)
        """Which tokens of the batch layer 1 selected, in rising order."""

    def set_positional_encoder(self, positional_encoder: PositionalEncoder) -> None:
        """Set how Q and K are rotated to positions."""
        self.positional_encoder = positional_encoder

    def set_reverse_positional_encoder(self, reverse_positional_encoder: PositionalEncoder) -> None:
        """Set how that rotation is undone."""
        self.reverse_positional_encoder = reverse_positional_encoder

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
        """Blend one layer, as the interface says; the tensors given are not changed.

        With nothing retrieved (K and V None) no token is valid: all are computed.

        Raises AssertionError when ``valid_mask`` is not on the CPU, when ``query_start_loc`` does not cover
        the retrieved tokens, and when a layer above 1 does not bring the tokens that layer 1 selected.
        """
        assert valid_mask.is_cpu, "valid_mask should be on CPU"
        if retrieved_k is None or retrieved_v is None:
            retrieved_k = retrieved_v = _undefined(fresh_v, len(valid_mask), token_dim)
            valid_mask = torch.zeros_like(valid_mask)
            assert layer_id < 2 or len(self.indexes_in_kv) == len(valid_mask), "K and V are missing"
        assert query_start_loc[-1] == retrieved_v.shape[token_dim], (
            "query_start_loc does not match the tokens"
        )
        if layer_id == 1:
            valid = valid_mask.bool().to(fresh_v.device)
            difference = self._difference(retrieved_v.to(fresh_v.device), fresh_v, valid, token_dim)
            selected = select_tokens(difference, valid, query_start_loc, self.recompute_ratio)
            self.indexes_in_kv = selected.nonzero().squeeze(1)
            short_start_loc = pad(selected.cumsum(0), (1, 0))[query_start_loc.long()].to(query_start_loc)
            q = fresh_q.index_select(token_dim, self.indexes_in_kv)
            positions = positions[self.indexes_in_kv.to(positions.device)]
            return BlendOutput(q, fresh_k, fresh_v, positions, self.indexes_in_kv, short_start_loc)
        if layer_id > 1:
            assert fresh_k.shape[token_dim] == len(self.indexes_in_kv), "fresh K does not match the selection"
            retrieved_k = self._rotate(retrieved_k.to(fresh_k), original_positions, query_start_loc)
            fresh_k = retrieved_k.index_copy(token_dim, self.indexes_in_kv, fresh_k)
            fresh_v = retrieved_v.to(fresh_v).index_copy(token_dim, self.indexes_in_kv, fresh_v)
        everything = torch.arange(fresh_q.shape[token_dim], device=fresh_q.device)
        return BlendOutput(fresh_q, fresh_k, fresh_v, positions, everything, None)

    def _difference(
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
        """Return K at the positions within each request, instead of the ones it was stored at."""
        if self.positional_encoder is None or self.reverse_positional_encoder is None:
            _warn_of_missing_encoders()
            return k
        starts = query_start_loc.to(k.device, torch.long)
        new_positions = torch.arange(len(original_positions), device=k.device)
        new_positions -= starts[_request_of_tokens(starts)]
        unused_q = torch.zeros_like(k)
        old_positions = original_positions.to(k.device, torch.long)
        unused_q, k = self.reverse_positional_encoder(old_positions, unused_q, k.clone())
        return self.positional_encoder(new_positions, unused_q, k)[1]


def select_tokens(
    difference: torch.Tensor, valid: torch.Tensor, query_start_loc: torch.Tensor, ratio: float
) -> torch.Tensor:
    """Return a bool mask ``[num_tokens]`` of the tokens to compute.

    Those are all that are not valid, and of each request's n valid ones the ``int(n * ratio)`` that differ
    most, of equal ones the first. A NaN (a retrieved row that is no number) makes a token not valid.
    """
    valid = valid & ~difference.isnan()
    starts = query_start_loc.to(difference.device, torch.long)
    request = _request_of_tokens(starts)
    num_valid = pad(valid.cumsum(0), (1, 0))[starts].diff()
    quota = (num_valid.double() * ratio).long()  # float64, so that it is Python's int(n * ratio)
    order = difference.where(valid, -1).argsort(descending=True, stable=True)
    order = order[request[order].argsort(stable=True)]  # by request, then the most different first
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - starts[request]
    return ~valid | (rank < quota[request])


def _undefined(like: torch.Tensor, num_tokens: int, token_dim: int) -> torch.Tensor:
    """Return the K or V of tokens of which nothing was retrieved."""
    shape = list(like.shape)
    shape[token_dim] = num_tokens
    return like.new_empty(shape)


@cache
def _warn_of_missing_encoders() -> None:
    """Say it once per process, not once per layer."""
    logger.warning("no positional encoders are set: K is reused at the positions it was stored at")


def _request_of_tokens(starts: torch.Tensor) -> torch.Tensor:
    """Return the number of the request that each token belongs to, int64 ``[num_tokens]``."""
    return torch.arange(len(starts) - 1, device=starts.device).repeat_interleave(starts.diff())
