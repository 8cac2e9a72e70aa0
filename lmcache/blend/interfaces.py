"""Interfaces of blending, as LMCache 0.1 documents them: retrievers of KV, and executors that blend it."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch


@dataclass
class BlendOutput:
    """Input of one layer's attention: Q of the selected tokens, and the blended K and V of all tokens."""

    q: torch.Tensor
    """Q of the selected tokens."""
    k: torch.Tensor
    """K of all tokens."""
    v: torch.Tensor
    """V of all tokens."""
    positions: torch.Tensor
    """Positions of the selected tokens in their prompts."""
    local_indices: torch.Tensor
    """Indices of the selected tokens in the fresh Q. After the selecting layer these are all its indices,
    because the fresh Q then holds only selected tokens."""
    query_start_loc: torch.Tensor | None
    """Start of each request in ``q``, followed by the length of ``q``. None except at the selecting layer."""


@dataclass
class BlendRetrieverResult:
    """Stored K and V of all input tokens, for one layer."""

    k: torch.Tensor | None
    """Stored K, or None if nothing was retrieved. Rows of tokens that are not valid are undefined."""
    v: torch.Tensor | None
    """Stored V, or None if nothing was retrieved. Rows of tokens that are not valid are undefined."""
    valid_mask: torch.Tensor
    """int32 ``[num_tokens]``, on the CPU: 1 if the token's K and V were retrieved, otherwise 0."""
    original_positions: torch.Tensor
    """int32 ``[num_tokens]``, on the device of K and V: the position to which ``k`` is rotated; 0 for tokens
    that are not valid."""


class BlendRetrieverTask(abc.ABC):
    """A running retrieval."""

    @abc.abstractmethod
    def result(self, layer_id: int) -> BlendRetrieverResult:
        """Wait for one layer's K and V of all input tokens of the batch, and return them."""


class BlendRetriever(abc.ABC):
    """Retrieves the KV of prompts that consist of separately stored segments."""

    @abc.abstractmethod
    def new_request(self, full_prompts: list[torch.Tensor], indices: list[list[int]]) -> BlendRetrieverTask:
        """Start the retrieval of one batch's KV.

        ``full_prompts`` are token ids, ``[num_tokens]`` each. ``indices`` lists, for each prompt, the starts
        of its second and further segments.
        """


class BlendExecutor(abc.ABC):
    """Blends retrieved K and V with freshly computed K and V."""

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
        """Blend one layer, before its attention. Call it for the layers in order, starting with 0.

        - ``retrieved_k``, ``retrieved_v``, ``valid_mask``, ``original_positions``: the fields of a
          BlendRetrieverResult.
        - ``fresh_q``, ``fresh_k``, ``fresh_v``: computed by this layer, for the tokens still selected.
        - ``positions``: the positions of these tokens in their prompts.
        - ``query_start_loc``: the start of each request among **all** tokens, selected or not, followed by
          the number of all tokens (length: number of requests + 1).
        - ``token_dim``: the dimension of Q, K and V that counts tokens.
        """
