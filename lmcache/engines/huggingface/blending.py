"""Blending inside of a model's own forward pass: a cache that blends, and hooks that leave selected tokens.

Attention gives each layer's fresh K and V to the cache and computes with what it gets back, so that is where
they are blended. A hook before each decoder layer leaves of the hidden states those of the selected tokens.
Both know a blended prefill by its cache: calls with any other run as if there were no hooks.
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

_TOKEN_DIM = 1
"""Of K and V without the batch: ``[num_kv_heads, num_tokens, head_size]``."""


class BlendingPass:
    """One prefill of a row of prompts, each with positions from 0."""

    def __init__(
        self,
        task: BlendRetrieverTask,
        executor: CacheBlendImpl,
        lengths: list[int],
        device: torch.device,
        additive_mask: torch.dtype | None,
        attention: torch.Tensor | None = None,
    ) -> None:
        """``lengths``: of each prompt, in tokens. ``additive_mask``: the dtype of masks that are added to the
        scores; None: masks are bool. ``attention``: what the selection reads, see ``Candidates``."""
        self._task = task
        self._executor = executor
        self._mask_dtype = additive_mask
        self.positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        self.query_start_loc = torch.tensor([0, *lengths], device=device).cumsum(0)
        counts = torch.tensor(lengths, device=device)
        self._request = torch.arange(len(lengths), device=device).repeat_interleave(counts)
        self._selected: torch.Tensor | None = None
        """The tokens that are computed from now on; None: all."""
        self._narrow: dict[str, Any] = {}
        """A decoder layer's arguments for the selected tokens, from the first layer on that gets them."""
        found = task.result(0)
        stored_at = found.original_positions.to(device)
        self._select(executor.begin(found.valid_mask, stored_at, self.query_start_loc, attention))

    @property
    def selected(self) -> torch.Tensor:
        """int64: the tokens that are computed from now on, in rising order."""
        if self._selected is None:
            return torch.arange(len(self.positions), device=self.positions.device)
        return self._selected

    def mask(self, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Return the attention mask of ``tokens`` (None: all): ``[1, 1, len(tokens), num_tokens]``."""
        is_visible = self.is_visible(torch.arange(len(self.positions)) if tokens is None else tokens)
        if self._mask_dtype is None:
            return is_visible[None, None]
        lowest = torch.finfo(self._mask_dtype).min
        return torch.zeros_like(is_visible, dtype=self._mask_dtype).masked_fill_(~is_visible, lowest)[
            None, None
        ]

    def is_visible(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return which tokens each of ``tokens`` may attend to: bool ``[len(tokens), num_tokens]``."""
        is_before = self.positions <= self.positions[tokens, None]
        return is_before & (self._request == self._request[tokens, None])

    def blend(self, layer_id: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of all tokens, for fresh ``[1, num_kv_heads, num_selected, head_size]``."""
        found = self._task.result(layer_id)
        out = self._executor.blend(
            layer_id,
            found.k if found.k is None else found.k.to(k.device),
            found.v if found.v is None else found.v.to(v.device),
            found.valid_mask,
            found.original_positions,
            k[0],  # stands for Q, which is not seen here: the hook before the next layer does what it would
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
        if tokens is not None and len(tokens) < len(self.positions):  # all: the pass stays as it is
            self._selected = tokens


class BlendedCache(DynamicCache):  # type: ignore[misc]
    """A DynamicCache whose first update of each layer blends; after the prefill it is like any other."""

    def __init__(self, blending: BlendingPass, num_layers: int) -> None:
        super().__init__()
        self.blending: BlendingPass | None = blending
        self.observer: QuestionAttention | None = None
        self._num_layers = num_layers

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of all tokens, from fresh ones ``[1, num_kv_heads, num_selected, head_size]``."""
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
    """Sums up over layers how strongly the questions look at every token: the largest weight that any head of
    any of their tokens gives it. (A mean lets the many that look elsewhere outvote the one that needs it:
    a sixth more divergence at the same share.)"""

    def __init__(self, blending: BlendingPass, is_question: torch.Tensor) -> None:
        """``is_question``: bool ``[num_tokens]``, which tokens to look at; all of them are selected."""
        self._rows = is_question[blending.selected].nonzero().squeeze(1)
        self._is_visible = blending.is_visible(is_question.nonzero().squeeze(1))
        self._layers: set[int] = set()  # that were seen: several BlendedModels may have hooks on one model
        self.total = torch.zeros(len(is_question), device=is_question.device)
        """float32 ``[num_tokens]``"""

    def add(self, attention: Any, hidden: torch.Tensor, rotations: Any, k: torch.Tensor) -> None:
        """Add a layer's: ``attention`` its module, ``hidden`` and ``rotations`` (cosines, sines) what it was
        given, ``k`` of all tokens ``[1, num_kv_heads, num_tokens, head_size]``.

        Computes Q of these few tokens again, as transformers' modules of all ``FAMILIES`` do.
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
        q = q.unflatten(1, (k.shape[1], -1))  # [1, num_kv_heads, heads of one, num_rows, head_size]
        scores = (
            q.flatten(2, 3) @ k.transpose(-1, -2)
        ).float() * attention.scaling  # K is not copied per head
        scores = scores.unflatten(2, (-1, len(self._rows))).masked_fill_(~self._is_visible, -torch.inf)
        self.total += scores.softmax(-1).amax((0, 1, 2, 3))


def add_hooks(model: PreTrainedModel) -> list[RemovableHandle]:
    """Let the model's decoder layers compute selected tokens only, in passes with a BlendedCache."""
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
