"""vLLM's KV cache groups in our words: which can be cached, as what kind, and which ranks hold the same.

Specs are told apart by the names of their classes: a subclass may mean something else by its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lmcache.engines.errors import UnsupportedError
from lmcache.kv_groups import GroupKind

_LATENTS = "MLAAttentionSpec"
"""KV that is one latent per token, whatever the number of heads (DeepSeek, Kimi)."""


class GroupSpec(NamedTuple):
    """What vLLM says of one of its groups."""

    kind: GroupKind
    window_tokens: int
    """As in ``KVGroup``."""
    block_tokens: int
    layers: Sequence[str]
    is_drafter: bool


def read_groups(kv_cache_config: Any, *, can_fail_requests: bool) -> list[GroupSpec]:
    """Read the groups in the order of the engine's block tables.

    ``can_fail_requests``: the engine takes a failed load of several groups, or of a window, back as a whole
    (vLLM 0.30 and later). Raises UnsupportedError with the reason why they can't be cached.
    """
    groups = [_read_group(group) for group in kv_cache_config.kv_cache_groups]
    is_plain = len(groups) == 1 and groups[0].kind is GroupKind.FULL_ATTENTION
    if not (is_plain or can_fail_requests):
        raise UnsupportedError(
            "KV that is not one group of full attention is cached with vLLM 0.30 and later: this one can't"
            " compute a request anew whose load failed"
        )
    return groups


def _read_group(group: Any) -> GroupSpec:
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        raise UnsupportedError("KV that vLLM itself keeps in host memory, or derives, can't be cached")
    kinds = {_kind(spec) for spec in layer_specs(group.kv_cache_spec)}
    if len(kinds) != 1:
        raise UnsupportedError("the layers of a KV group are of unlike kinds")
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
            f"states in mode {spec.mamba_cache_mode!r} leave no snapshots where requests could resume: start"
            " vLLM with --enable-prefix-caching and --mamba-cache-mode align"
        )
    raise UnsupportedError(f"KV of kind {name} can't be cached yet")  # also DeepSeek V4's compressed latents


def layer_specs(spec: Any) -> list[Any]:
    """Those of a group whose layers differ, else the group's own."""
    by_layer = getattr(spec, "kv_cache_specs", None)
    return list(by_layer.values()) if by_layer else [spec]


def num_replicas(tensor_parallel: int, kv_cache_config: Any) -> int:
    """Count the consecutive tensor-parallel ranks that hold the same KV: latents are not split by heads, and
    there may be more ranks than KV heads.

    vLLM says it since 0.31; before, latents alone are known to be the same.
    """
    known: int | None = getattr(kv_cache_config, "kv_tp_replicas", None)
    if known is not None:
        return known
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in layer_specs(group.kv_cache_spec)]
    return tensor_parallel if all(type(spec).__name__ == _LATENTS for spec in specs) else 1
