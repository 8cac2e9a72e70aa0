"""Attention for the new tokens of a prompt only, where SGLang's ``torch_native`` computes that of all tokens.

That backend computes the attention of the cached tokens again and drops it. Its results have the same bits
with and without a hit, which tests need. But a hit of 8,192 tokens then takes seconds, in which no difference
between caches shows. Benchmarks and the demo therefore set the variable ``VARIABLE``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

VARIABLE = "LMCACHE_TEST_ATTENTION_OF_NEW_TOKENS"

Extend = Callable[..., torch.Tensor]


def register() -> None:
    """Replace the backend's method if the variable is set."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    if os.environ.get(VARIABLE) == "1":
        original = TorchNativeAttnBackend._run_sdpa_forward_extend
        TorchNativeAttnBackend._run_sdpa_forward_extend = _replacement(original)


def _replacement(original: Extend) -> Extend:
    def extend(
        self: Any,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        start = 0
        for number, (length, new) in enumerate(zip(seq_lens.tolist(), extend_seq_lens.tolist(), strict=True)):
            part, this = slice(start, start + new), slice(number, number + 1)
            start += new
            if encoder_lens is None and 2 * new < length and _is_plain(options):
                tokens = req_to_token[req_pool_indices[number], :length]
                output[part] = _attention(query[part], k_cache[tokens], v_cache[tokens], options)
            else:
                lengths = (
                    req_pool_indices[this],
                    seq_lens[this],
                    extend_prefix_lens[this],
                    extend_seq_lens[this],
                )
                encoded = None if encoder_lens is None else encoder_lens[this]
                caches = k_cache, v_cache, req_to_token
                original(self, query[part], output[part], *caches, *lengths, encoded, **options)
        return output

    return extend


def _is_plain(options: dict[str, Any]) -> bool:
    window = options.get("sliding_window_size")
    return bool(options.get("causal")) and not options.get("is_cross_attn") and (window is None or window < 0)


def _attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """Return the attention ``[tokens, heads, head_dim]`` of the last tokens to all tokens before each."""
    new, length = query.shape[0], keys.shape[0]
    mask = torch.ones(new, length, dtype=torch.bool).tril(length - new)
    query, keys, values = (
        tensor.to(query.dtype).movedim(0, 1).unsqueeze(0) for tensor in (query, keys, values)
    )
    result = scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, enable_gqa=options["enable_gqa"], scale=options["scaling"]
    )
    return result.squeeze(0).movedim(1, 0)
