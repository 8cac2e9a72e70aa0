"""Blends inside a model's own forward pass: a cache that blends, and hooks that drop unselected tokens.

Blending answers a prompt of several documents and a question. It reuses the stored KV of the documents. Only
the question and some selected tokens of the documents are computed afresh. A ``Selection`` chooses these
tokens (``lmcache.blend.selection``).

Attention passes each layer's fresh K and V to the cache, and computes with the K and V that the cache
returns. The cache therefore returns stored K and V, with those of the selected tokens replaced by fresh ones.
A hook before each decoder layer reduces the hidden states to those of the selected tokens. The hooks act only
in passes with a BlendedCache that still blends. All other calls run as if there were no hooks.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from lmcache.blend.executor import CacheBlendImpl
from lmcache.blend.interfaces import BlendRetrieverTask
from lmcache_client.blend.attention import largest_weights

_TOKEN_DIM = 1
"""Dimension of the tokens in K and V without the batch, ``[num_kv_heads, num_tokens, head_size]``."""


class BlendingPass:
    """One prefill of prompts that are packed side by side, each with positions from 0."""

    def __init__(
        self,
        task: BlendRetrieverTask,
        executor: CacheBlendImpl,
        lengths: list[int],
        device: torch.device,
        additive_mask: torch.dtype | None,
        attention: torch.Tensor | None = None,
    ) -> None:
        """``lengths``: tokens of each prompt; ``additive_mask``: dtype of masks that are added to the scores,
        None for bool masks; ``attention``: the questions' attention to each token, which some selections read
        (``lmcache.blend.selection.Candidates``)."""
        self._task = task
        self._executor = executor
        self._mask_dtype = additive_mask
        self.positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        self.query_start_loc = torch.tensor([0, *lengths], device=device).cumsum(0)
        counts = torch.tensor(lengths, device=device)
        self._request = torch.arange(len(lengths), device=device).repeat_interleave(counts)
        self._selected: torch.Tensor | None = None
        """Tokens that later layers compute; None: all."""
        self._narrow: dict[str, Any] = {}
        """A decoder layer's arguments for the selected tokens; empty before the first such layer."""
        retrieved = task.result(0)
        positions = retrieved.original_positions.to(device)
        self._select(executor.begin(retrieved.valid_mask, positions, self.query_start_loc, attention))

    @property
    def selected(self) -> torch.Tensor:
        """Tokens that later layers compute, int64 in ascending order."""
        if self._selected is None:
            return torch.arange(len(self.positions), device=self.positions.device)
        return self._selected

    def mask(self, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Return the attention mask of ``tokens`` (None: all), ``[1, 1, len(tokens), num_tokens]``."""
        is_visible = self.is_visible(torch.arange(len(self.positions)) if tokens is None else tokens)
        if self._mask_dtype is None:
            return is_visible[None, None]
        lowest = torch.finfo(self._mask_dtype).min
        mask = torch.zeros_like(is_visible, dtype=self._mask_dtype).masked_fill_(~is_visible, lowest)
        return mask[None, None]

    def is_visible(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return which tokens each of ``tokens`` may attend to: bool ``[len(tokens), num_tokens]``."""
        is_before = self.positions <= self.positions[tokens, None]
        return is_before & (self._request == self._request[tokens, None])

    def blend(self, layer_id: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of all tokens, given fresh ones ``[1, num_kv_heads, num_selected, head_size]``."""
        retrieved = self._task.result(layer_id)
        out = self._executor.blend(
            layer_id,
            retrieved.k if retrieved.k is None else retrieved.k.to(k.device),
            retrieved.v if retrieved.v is None else retrieved.v.to(v.device),
            retrieved.valid_mask,
            retrieved.original_positions,
            k[0],  # a stand-in for Q, which the cache never sees: the result for Q is not used
            k[0],
            v[0],
            self.positions if self._selected is None else self.positions[self._selected],
            self.query_start_loc,
            _TOKEN_DIM,
        )
        if out.query_start_loc is not None:
            self._select(self._executor.indexes_in_kv)
        return out.k[None], out.v[None]

    def narrowed(self, hidden: torch.Tensor, kwargs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return a decoder layer's arguments for the selected tokens only."""
        tokens = self._selected
        if tokens is None:
            return hidden, kwargs
        if not self._narrow:
            hidden = hidden[:, tokens]
            self._narrow = {
                "attention_mask": self.mask(tokens),
                "position_ids": self.positions[None, tokens],
                "position_embeddings": tuple(x[:, tokens] for x in kwargs["position_embeddings"]),
            }
        return hidden, kwargs | self._narrow

    def _select(self, tokens: torch.Tensor | None) -> None:
        if tokens is not None and len(tokens) < len(self.positions):  # selecting all tokens changes nothing
            self._selected = tokens


class BlendedCache(DynamicCache):  # type: ignore[misc]
    """A DynamicCache that blends in the first update of each layer, and is ordinary after the prefill."""

    def __init__(self, blending: BlendingPass, num_layers: int) -> None:
        super().__init__()
        self.blending: BlendingPass | None = blending
        self.observer: QuestionAttention | None = None
        self._num_layers = num_layers

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of all tokens, given fresh ones ``[1, num_kv_heads, num_selected, head_size]``."""
        if self.blending is None:
            kv: tuple[torch.Tensor, torch.Tensor] = super().update(
                key_states, value_states, layer_idx, *args, **kwargs
            )
            return kv
        layer = DynamicLayer()
        layer.lazy_initialization(key_states, value_states)
        keys, values = layer.keys, layer.values = self.blending.blend(layer_idx, key_states, value_states)
        self.layers.append(layer)
        if len(self.layers) == self._num_layers:
            self.blending = None
        return keys, values


class QuestionAttention:
    """Measures how strongly the questions attend to every token, summed over layers.

    The question is the last part of a prompt. In each layer, the measure is the largest weight that any head
    of any of the question's tokens gives the token. A mean would be a worse measure, because most heads
    attend to other tokens: for the same number of selected tokens, the answers' KL divergence from a full
    prefill is a sixth larger.
    """

    def __init__(self, blending: BlendingPass, is_question: torch.Tensor) -> None:
        """``is_question``: the tokens to observe, bool ``[num_tokens]``. All of them must be selected."""
        self._rows = is_question[blending.selected].nonzero().squeeze(1)
        self._is_visible = blending.is_visible(is_question.nonzero().squeeze(1))
        self._layers: set[int] = set()  # layers counted so far: several BlendedModels may hook one model
        self.total = torch.zeros(len(is_question), device=is_question.device)
        """Sums of the weights, float32 ``[num_tokens]``."""

    def add(self, attention: Any, hidden: torch.Tensor, rotations: Any, k: torch.Tensor) -> None:
        """Add the weights of one layer, unless they were added before.

        Computes Q of the observed tokens again. Attention modules of all supported models
        (``blended.FAMILIES``) compute Q in this way.

        Args:
            attention: the layer's attention module.
            hidden: input of that module.
            rotations: (cosines, sines) of that input.
            k: K of all tokens, ``[1, num_kv_heads, num_tokens, head_size]``.
        """
        if attention.layer_idx in self._layers:
            return
        self._layers.add(attention.layer_idx)
        q = attention.q_proj(hidden[:, self._rows]).unflatten(-1, (-1, attention.head_dim))
        if hasattr(attention, "q_norm"):
            q = attention.q_norm(q)
        q = q.transpose(1, 2)
        if getattr(attention, "use_rope", True):
            rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb
            q = rotate(q, q, *(x[:, self._rows] for x in rotations))[0]
        q, k = (x[0].transpose(0, 1) for x in (q, k))
        self.total += largest_weights(q, k, self._is_visible, attention.scaling)


def add_hooks(model: PreTrainedModel) -> list[RemovableHandle]:
    """Let the model's decoder layers compute only selected tokens in passes with a BlendedCache.

    Returns the hooks, which the caller must remove.
    """
    layers = model.get_decoder().layers
    narrow = [layer.register_forward_pre_hook(_before_layer, with_kwargs=True) for layer in layers]
    observe = [layer.self_attn.register_forward_hook(_after_attention, with_kwargs=True) for layer in layers]
    return narrow + observe


def _before_layer(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    cache = kwargs.get("past_key_values")
    if not isinstance(cache, BlendedCache) or cache.blending is None:
        return None
    hidden, kwargs = cache.blending.narrowed(args[0], kwargs)
    return (hidden, *args[1:]), kwargs


def _after_attention(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    cache = kwargs.get("past_key_values")
    if isinstance(cache, BlendedCache) and cache.observer is not None:
        keys = cache.layers[attention.layer_idx].keys
        cache.observer.add(attention, kwargs["hidden_states"], kwargs["position_embeddings"], keys)
