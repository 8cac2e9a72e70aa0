"""Translates vLLM's KV cache groups: which of them can be cached, their kinds, and ranks with the same KV.

Specs are distinguished by the names of their classes, because a subclass may use its blocks differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lmcache_client.errors import UnsupportedError
from lmcache_store.kv_groups import GroupKind

_LATENTS = "MLAAttentionSpec"
"""KV that is one latent per token, whatever the number of heads (DeepSeek, Kimi)."""


class GroupSpec(NamedTuple):
    """One of vLLM's KV cache groups."""

    kind: GroupKind
    window_tokens: int
    """Same as in ``KVGroup``."""
    block_tokens: int
    layers: Sequence[str]
    """Names of the group's layers."""
    is_drafter: bool
    """True for the layers of a model that drafts tokens."""


def read_groups(kv_cache_config: Any, *, can_fail_requests: bool) -> list[GroupSpec]:
    """Read the groups in the order of the engine's block tables.

    ``can_fail_requests``: the engine restarts a request whose load of several groups, or of a window, failed
    (vLLM 0.30 and later). Raises UnsupportedError with the reason if the groups can't be cached.
    """
    groups = [_read_group(group) for group in kv_cache_config.kv_cache_groups]
    is_plain = len(groups) == 1 and groups[0].kind is GroupKind.FULL_ATTENTION
    if not (is_plain or can_fail_requests):
        raise UnsupportedError(
            "this model needs vLLM 0.30 or later to be cached: older versions can't restart a request whose"
            " load failed, unless all layers have full attention in one KV group"
        )
    return groups


def _read_group(group: Any) -> GroupSpec:
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        raise UnsupportedError("KV that vLLM itself keeps in host memory, or derives, can't be cached")
    kinds = {_kind(spec) for spec in layer_specs(group.kv_cache_spec)}
    if len(kinds) != 1:
        raise UnsupportedError("a KV group has layers of different kinds, which can't be cached")
    ((kind, window_tokens),) = kinds
    block_tokens = group.kv_cache_spec.block_size
    return GroupSpec(kind, window_tokens, block_tokens, group.layer_names, bool(group.is_eagle_group))


def _kind(spec: Any) -> tuple[GroupKind, int]:
    name = type(spec).__name__
    if name == "FullAttentionSpec" or (name == _LATENTS and not getattr(spec, "model_version", None)):
        return GroupKind.FULL_ATTENTION, 0
    if name == "SlidingWindowSpec":
        return GroupKind.SLIDING_WINDOW, spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
    if name == "ChunkedLocalAttentionSpec":
        return GroupKind.CHUNKED_ATTENTION, spec.attention_chunk_size
    if name == "MambaSpec" and spec.mamba_cache_mode == "align":
        return GroupKind.STATE, 0
    if name == "MambaSpec":
        raise UnsupportedError(
            f"state layers in mode {spec.mamba_cache_mode!r} leave no snapshots to resume from: start vLLM"
            " with --enable-prefix-caching and --mamba-cache-mode align"
        )
    raise UnsupportedError(f"KV of kind {name} can't be cached yet")  # also DeepSeek V4's compressed latents


def layer_specs(spec: Any) -> list[Any]:
    """Return the specs of a group's layers if they differ, otherwise the group's only spec."""
    by_layer = getattr(spec, "kv_cache_specs", None)
    return list(by_layer.values()) if by_layer else [spec]


def num_replicas(tensor_parallel: int, kv_cache_config: Any) -> int:
    """Return how many consecutive tensor-parallel ranks hold the same KV.

    Several ranks do if KV heads are fewer than ranks, or if the KV is latent and has no heads. vLLM 0.31 and
    later provide the number. In earlier versions, only latents are known to be the same.
    """
    replicas: int | None = getattr(kv_cache_config, "kv_tp_replicas", None)
    if replicas is not None:
        return replicas
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in layer_specs(group.kv_cache_spec)]
    return tensor_parallel if all(type(spec).__name__ == _LATENTS for spec in specs) else 1
