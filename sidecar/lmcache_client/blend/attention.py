"""Attention of a question to the tokens before it, which shows the tokens that matter to the answer."""

from __future__ import annotations

import torch

MAX_OBSERVED = 128
"""Largest number of a question's tokens whose attention is measured: the last ones."""
_MAX_SCORES_BYTES = 32 << 20
"""Largest size of the scores that are computed together. The arithmetic needs about three times as much."""


def largest_weights(q: torch.Tensor, k: torch.Tensor, is_visible: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the largest attention weight that each token gets, among all heads and all observed tokens.

    The arithmetic is in float32, or in float64 for such Q, because products of Q and K can exceed float16.

    Args:
        q: Q of the observed tokens, ``[num_observed, num_heads, head_size]``.
        k: K of all tokens, ``[num_tokens, num_kv_heads, head_size]``. K of tokens that no observed token sees
            may be undefined.
        is_visible: bool ``[num_observed, num_tokens]``: whether the observed token may attend to the token.
            Each observed token attends to at least one.
        scale: factor of the products of Q and K.

    Returns:
        float32 ``[num_tokens]``; NaN if the visible K, or Q, has a NaN.
    """
    num_tokens, num_kv_heads, head_size = k.shape
    num_observed, num_shared = len(q), q.shape[1] // num_kv_heads
    largest = torch.zeros(num_tokens, device=q.device)
    if not num_observed or not num_tokens:
        return largest
    wide = torch.promote_types(q.dtype, torch.float32)
    limit = _MAX_SCORES_BYTES // (wide.itemsize * num_tokens)
    num_rows = min(num_observed, max(1, limit // num_shared))
    num_heads = max(1, limit // max(num_shared * num_rows, head_size))
    q = q.reshape(num_observed, num_kv_heads, num_shared, head_size).permute(1, 2, 0, 3)
    k = k.permute(1, 2, 0)
    is_hidden = ~is_visible
    for head in range(0, num_kv_heads, num_heads):
        heads = slice(head, head + num_heads)
        keys = k[heads].to(wide)
        for row in range(0, num_observed, num_rows):
            rows = slice(row, row + num_rows)
            products = q[heads, :, rows].to(wide).flatten(1, 2) @ keys  # K is not copied per head
            scores = products.float().mul_(scale).view(len(keys), num_shared, -1, num_tokens)
            weights = scores.masked_fill_(is_hidden[rows], -torch.inf).softmax(-1)
            largest = largest.maximum(weights.amax((0, 1, 2)))
    return largest
