"""A reference implementation of FlashAttention 3's ``fwd`` for causal attention over paged KV."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from testing.vllm_gpu.device import NotEmulatedError

_PARAMETERS = {
    "q": "Tensor",
    "k": "Tensor",
    "v": "Tensor",
    "k_new": "Tensor?",
    "v_new": "Tensor?",
    "q_v": "Tensor?",
    "out": "Tensor(a!)?",
    "cu_seqlens_q": "Tensor?",
    "cu_seqlens_k": "Tensor?",
    "cu_seqlens_k_new": "Tensor?",
    "seqused_q": "Tensor?",
    "seqused_k": "Tensor?",
    "max_seqlen_q": "int?",
    "max_seqlen_k": "int?",
    "page_table": "Tensor?",
    "kv_batch_idx": "Tensor?",
    "leftpad_k": "Tensor?",
    "rotary_cos": "Tensor?",
    "rotary_sin": "Tensor?",
    "seqlens_rotary": "Tensor?",
    "q_descale": "Tensor?",
    "k_descale": "Tensor?",
    "v_descale": "Tensor?",
    "softmax_scale": "float?",
    "is_causal": "bool",
    "window_left": "int",
    "window_right": "int",
    "softcap": "float",
    "is_rotary_interleaved": "bool",
    "scheduler_metadata": "Tensor?",
    "num_splits": "int",
    "pack_gqa": "bool?",
    "sm_margin": "int",
    "s_aux": "Tensor?",
    "cp_world_size": "int",
    "cp_rank": "int",
    "cp_tot_seqused_k": "Tensor?",
}
_EMULATED = {
    *("q", "k", "v", "out", "cu_seqlens_q", "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table"),
    *("softmax_scale", "is_causal"),
}
_WITHOUT_EFFECT = {
    *("is_rotary_interleaved", "scheduler_metadata", "num_splits", "pack_gqa", "sm_margin"),
    *("q_descale", "k_descale", "v_descale"),  # scales of 1 for KV that is not quantized
}
_NEUTRAL: Mapping[str, Any] = {
    "window_left": -1,
    "window_right": -1,
    "softcap": 0.0,
    "cp_world_size": 1,
    "cp_rank": 0,
}
"""Values of the remaining parameters with which attention is plain. The others must be None."""

SCHEMA = f"_vllm_fa3_C::fwd({', '.join(f'{kind} {name}' for name, kind in _PARAMETERS.items())}) -> Tensor[]"


def fwd(*args: Any) -> list[torch.Tensor]:
    """Return the answer, and in place of FlashAttention's other results tensors that nobody reads."""
    given = dict(zip(_PARAMETERS, args, strict=True))
    for name in _PARAMETERS.keys() - _EMULATED - _WITHOUT_EFFECT:
        if given[name] != _NEUTRAL.get(name):
            raise NotEmulatedError(f"attention with {name}={given[name]} is not emulated")
    if not given["is_causal"] or given["page_table"] is None:
        raise NotEmulatedError("only causal attention over paged KV is emulated")
    query, starts = given["q"], given["cu_seqlens_q"].tolist()
    out = given["out"] if given["out"] is not None else torch.empty_like(query)
    sequences = zip(starts, starts[1:], given["seqused_k"].tolist(), given["page_table"], strict=False)
    for start, end, num_keys, pages in sequences:
        if end > start:
            key, value = (cache[pages].flatten(0, 1)[:num_keys] for cache in (given["k"], given["v"]))
            out[start:end] = _attention(query[start:end], key, value, given["softmax_scale"])
    return [out, query.new_zeros(query.shape[1], query.shape[0]), query.new_empty(0), query.new_empty(0)]


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of the last tokens of a sequence, ``[tokens, heads, head_dim]``, in float32."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (part.float().repeat_interleave(repeats, 1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
    first = len(key) - len(query)
    is_later = torch.ones(len(query), len(key), dtype=torch.bool).triu(first + 1)
    weights = scores.masked_fill(is_later, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)
