"""What retrieves KV for blending and what blends it, as the documents of LMCache 0.1 specify both."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch


@dataclass
class BlendOutput:
    """What one layer's attention computes with: a short Q and the whole, blended K and V."""

    q: torch.Tensor
    """Q of the selected tokens."""
    k: torch.Tensor
    """K of all tokens."""
    v: torch.Tensor
    """V of all tokens."""
    positions: torch.Tensor
    """Positions of the selected tokens in their inputs."""
    local_indices: torch.Tensor
    """Where in the fresh Q the selected tokens were: above the layer that selects, where the fresh Q holds
    only these, 0 to its length."""
    query_start_loc: torch.Tensor | None
    """Where each request starts in ``q``, and its length at the end. None unless tokens were selected now."""


@dataclass
class BlendRetrieverResult:
    """One layer's K and V of all input tokens, as far as they were stored."""

    k: torch.Tensor | None
    """None when nothing was retrieved. Rows of tokens that are not valid are undefined."""
    v: torch.Tensor | None
    """As ``k``."""
    valid_mask: torch.Tensor
    """int32 ``[num_tokens]``, on the CPU: 1 where the token's K and V were retrieved."""
    original_positions: torch.Tensor
    """int32 ``[num_tokens]``, on the device of K and V: the position that ``k`` is rotated to; 0 where
    not valid."""


class BlendRetrieverTask(abc.ABC):
    """A retrieval under way."""

    @abc.abstractmethod
    def result(self, layer_id: int) -> BlendRetrieverResult:
        """Wait for one layer's K and V; they are as long as the input tokens of the request."""


class BlendRetriever(abc.ABC):
    """Retrieves the KV of prompts that are made of segments stored apart."""

    @abc.abstractmethod
    def new_request(self, full_prompts: list[torch.Tensor], indices: list[list[int]]) -> BlendRetrieverTask:
        """Start the retrieval of one batch's KV.

        ``full_prompts`` are token ids ``[num_tokens]``, ``indices`` where in each prompt its second and
        further segments start.
        """


class BlendExecutor(abc.ABC):
    """Blends retrieved K and V with those just computed."""

    @abc.abstractmethod
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
        """Blend one layer, before its attention. Call it for the layers 0, 1, 2 and so on.

        ``retrieved_k``, ``retrieved_v``, ``valid_mask``, ``original_positions``: a BlendRetrieverResult.
        ``fresh_q``, ``fresh_k``, ``fresh_v``: just computed, for the tokens that are still selected.
        ``positions``: of these tokens in their inputs.
        ``query_start_loc``: where each request starts among **all** tokens, whatever was selected, and their
        number at the end (number of requests + 1).
        ``token_dim``: which dimension of Q, K and V counts tokens.
        """
