"""The passes of one blended prompt: which of its tokens they compute, and what they measure."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any

import torch

from lmcache_client.blend.attention import MAX_OBSERVED, largest_weights
from lmcache_client.core.blend_jobs import BlendJob
from lmcache_client.vllm.blend.pages import AttentionPages
from lmcache_client.vllm.blend.passes import Passes
from lmcache_client.vllm.blend.ranks import run_together

_NUM_ANCHORS = 16
"""First tokens of a prompt, to which all others attend strongly. They must be exact."""

_Pass = Callable[[torch.Tensor], None]
"""Runs one forward pass over these positions."""


class PromptPasses:
    """A prompt whose stored KV is placed. Tensors are on the CPU, and have one element per token.

    A generator here runs one forward pass for each budget that is sent, and yields the cost of the pass, both
    in tokens. It returns the last budget.
    """

    def __init__(
        self,
        job: BlendJob,
        is_placed: torch.Tensor,
        stored_at: torch.Tensor,
        passes: Passes,
        layers: Mapping[str, Any],
        pages: Mapping[str, AttentionPages],
    ) -> None:
        self._job, self._passes, self._layers, self._pages = job, passes, layers, pages
        self._tokens, self._table = torch.tensor(job.tokens), torch.tensor(job.blocks)
        positions = torch.arange(job.end)
        is_open = positions >= job.begin
        self._is_missing = is_open & ~is_placed
        self._is_question = positions >= job.question
        # A document at the beginning of the prompt has exact KV, too.
        is_exact = (stored_at == positions) & (positions < job.exact_end)
        self._is_exact = ~is_open | (is_placed & is_exact)
        self.is_reusable = is_open & is_placed & (positions >= job.documents) & ~self._is_question
        """Whether a token belongs to a document and has stored KV."""
        self._is_computed = torch.zeros(job.end, dtype=torch.bool)

    def compare(self, layer: int, deviation: torch.Tensor, budget: int) -> Generator[int, int, int]:
        """Compute the layers up to ``layer``, and note how far its V is from the stored V."""
        names, size = list(self._layers), self._passes.block_tokens
        name = names[min(layer, len(names) - 1)]
        pages = self._pages[name]

        def run(positions: torch.Tensor) -> None:
            first, last = int(positions[0]) // size, int(positions[-1]) // size + 1
            blocks = self._table[first:last].to(self._passes.device)
            rows = (positions - first * size).to(self._passes.device)
            stored = pages.v(pages.bytes[blocks])[rows].float()
            self._run(positions, stop_before=name)
            fresh = pages.v(pages.bytes[blocks])[rows].float()
            deviation[positions] = (fresh - stored).square().mean((1, 2)).cpu()

        return (yield from self._compute(~self._is_exact & ~self._is_question, budget, run))

    def observe(self, weights: torch.Tensor, budget: int) -> Generator[int, int, int]:
        """Compute the question over the reused KV, and note its ``weights``, float32 ``[layers, end]``."""
        job, size = self._job, self._passes.block_tokens
        # The engine may not have a block yet for the last token.
        length = min(len(job.tokens), len(job.blocks) * size)
        begin = max(job.begin, min(max(job.question, length - MAX_OBSERVED), length - 1))
        is_needed = torch.zeros(length, dtype=torch.bool)
        is_needed[: job.end] = self._is_missing
        is_needed[max(job.begin, min(job.question, begin)) :] = True
        numbers = {name: number for number, name in enumerate(self._layers)}
        blocks = self._table[: -(-length // size)].to(self._passes.device)

        def run(positions: torch.Tensor) -> None:
            observed = positions[positions >= begin]
            is_visible = (torch.arange(length) <= observed[:, None]).to(self._passes.device)

            def observe(name: str, q: torch.Tensor) -> None:
                layer, measured = self._layers[name], weights[numbers[name]]
                shared, head = q.shape[1] // layer.num_kv_heads, 0
                for k in self._pages[name].k_of_blocks(blocks):
                    heads = slice(head, head := head + shared * k.shape[1])
                    largest = largest_weights(q[:, heads], k[:length], is_visible, layer.impl.scale)
                    measured.copy_(measured.maximum(largest[: job.end].cpu()))

            self._run(positions, observer=observe if len(observed) else None, num_observed=len(observed))
            self._is_computed[positions[positions < job.end]] = True

        return (yield from self._compute(is_needed, budget, run))

    def choose(self, is_selected: torch.Tensor) -> torch.Tensor:
        """Return which tokens must be computed if the selection has selected these."""
        is_chosen = (is_selected & self.is_reusable) | self._is_missing | self._is_question
        if self._job.selection != "none":  # the baseline reuses all tokens
            is_chosen[:_NUM_ANCHORS] = True
        return is_chosen & ~self._is_exact

    def compute_chosen(self, is_chosen: torch.Tensor, budget: int) -> Generator[int, int, int]:
        """Compute K and V of the chosen tokens in all layers, in their order.

        Nothing reads the last layer's attention: the engine itself computes the prompt's last token.
        """
        # A token that was computed while the question was observed is correct if no earlier token changes.
        first = (is_chosen & ~self._is_computed).nonzero().flatten()
        begin = int(first[0]) if len(first) else len(is_chosen)
        is_pending = is_chosen & (torch.arange(len(is_chosen)) >= begin)
        run = partial(self._run, stop_before=list(self._layers)[-1])
        return (yield from self._compute(is_pending, budget, run))

    def _compute(self, is_needed: torch.Tensor, budget: int, run: _Pass) -> Generator[int, int, int]:
        positions = is_needed.nonzero().flatten()
        while len(positions):
            while budget < 1:
                budget = yield 0
            count, cost = self._passes.fitting(positions, budget)
            run_together(partial(run, positions[:count]))
            positions = positions[count:]
            budget = yield cost
        return budget

    def _run(self, positions: torch.Tensor, **options: Any) -> None:
        self._passes.run(self._tokens[positions], positions, self._table, **options)
