"""A Llama's forward pass over one sequence, written out so that KV is blended before each attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from lmcache.blend.interfaces import BlendExecutor, BlendOutput, BlendRetrieverTask
from lmcache.utils import KVCache

Blend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], BlendOutput]
"""``(layer, q, k, v, positions)``; Q, K and V are ``[num_tokens, num_heads, head_size]``."""


class Forward:
    """The weights of a model, and its ways to rotate Q and K to positions and back."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._model = model.model
        self._head = model.lm_head
        self._head_size = model.config.head_dim

    def rotate(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, direction: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._model.rotary_emb(q, positions[None])
        q, k = apply_rotary_pos_emb(q[None], k[None], cos, direction * sin, unsqueeze_dim=2)
        return q[0], k[0]

    def rotate_back(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rotate(positions, q, k, direction=-1)

    def prefill(self, tokens: torch.Tensor) -> tuple[torch.Tensor, KVCache]:
        """Return all tokens' logits and their KV, ``[num_tokens, num_heads, head_size]`` per layer."""
        layers = []

        def keep(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
        ) -> BlendOutput:
            layers.append((k, v))
            return BlendOutput(q, k, v, positions, torch.arange(len(q)), None)

        return self._run(tokens, keep), tuple(layers)

    def blended(
        self, tokens: torch.Tensor, task: BlendRetrieverTask, executor: BlendExecutor
    ) -> torch.Tensor:
        """Return the logits of the tokens that were computed to the end."""
        starts = torch.tensor([0, len(tokens)])

        def blend(
            layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
        ) -> BlendOutput:
            found = task.result(layer)
            stored = found.k, found.v, found.valid_mask, found.original_positions
            return executor.blend(layer, *stored, q, k, v, positions, starts, 0)

        return self._run(tokens, blend)

    @torch.no_grad()
    def _run(self, tokens: torch.Tensor, blend: Blend) -> torch.Tensor:
        hidden, positions = self._model.embed_tokens(tokens), torch.arange(len(tokens))
        for number, layer in enumerate(self._model.layers):
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            q, k, v = (
                project(normed).unflatten(-1, (-1, self._head_size))
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q, k = self.rotate(positions, q, k)
            out = blend(number, q, k, v, positions)
            hidden, positions = hidden[out.local_indices], out.positions
            is_visible = torch.arange(len(out.k)) <= positions[:, None]
            heads = [x.transpose(0, 1) for x in (out.q, out.k, out.v)]
            attended = scaled_dot_product_attention(
                heads[0], heads[1], heads[2], attn_mask=is_visible, enable_gqa=True
            )
            hidden = hidden + attention.o_proj(attended.transpose(0, 1).flatten(1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        logits: torch.Tensor = self._head(self._model.norm(hidden))
        return logits
