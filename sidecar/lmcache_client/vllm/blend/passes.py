"""Forward passes of the engine's own model over chosen tokens of a request, between the engine's steps.

A **row** of a pass is a run of successive tokens. For the attention, it is a request whose last tokens are
computed, over the blocks of the blended request. A layer writes K and V of all rows before it computes
attention, so that the rows of a pass read one another.

The pass is the model's own, with its own kernels, quantised weights, compiled code and collectives. No model
family is named here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from lmcache_client.errors import UnsupportedError

Observer = Callable[[str, torch.Tensor], None]
"""Is called with a layer's name and Q ``[num_tokens, heads, head_size]``."""


_ROW_COST = 4
"""Cost of each further row of a pass, in tokens of a long row: attention reads the KV before each row again.
On a CPU, 370 rows with 1,233 tokens took 1.4 times as long as one row with 2,048 tokens."""


class StoppedError(Exception):
    """Ends a pass: the K and V of its last layer are written."""


class Passes:
    """Passes of one model whose layers are one KV group of full attention."""

    def __init__(
        self, vllm_config: Any, spec: Any, model: Any, layers: Mapping[str, Any], num_blocks: int
    ) -> None:
        """``layers``: all attention layers of the KV group ``spec``, by name."""
        self._config, self._model, self._layers = vllm_config, model, layers
        self.stop_before = ""
        """Name of the layer whose attention the running pass does not need; empty for none."""
        cache = next(iter(layers.values())).kv_cache
        self.device = cache.device
        self.block_tokens: int = spec.block_size
        self._kernel_blocks = len(cache) // num_blocks  # of each block
        limits = vllm_config.scheduler_config
        self._max_tokens = limits.max_num_batched_tokens
        self.max_rows: int = limits.max_num_seqs if self.device.type == "cuda" else self._max_tokens
        """Largest number of rows of a pass. Backends for GPUs have buffers of this size."""
        backends = {layer.get_attn_backend() for layer in layers.values()}
        if len(backends) != 1:
            names = ", ".join(sorted(backend.get_name() for backend in backends))
            raise UnsupportedError(f"its layers have several attention backends ({names})")
        (backend,) = backends
        if backend.forward_includes_kv_cache_update:
            raise UnsupportedError(
                f"the attention backend {backend.get_name()} writes KV too late; choose another one"
                " with --attention-backend to blend"
            )
        kernel_spec = spec.copy_with_new_block_size(self.block_tokens // self._kernel_blocks)
        self._builder = backend.get_builder_cls()(kernel_spec, list(layers), vllm_config, self.device)

    def fitting(self, positions: torch.Tensor, budget: int = sys.maxsize) -> tuple[int, int]:
        """Return how many of the ascending positions the next pass can compute, and their cost in tokens.

        At least one position fits, whatever the ``budget`` for the cost.
        """
        positions = positions[: max(1, min(budget, self._max_tokens))]
        num_rows = torch.zeros(len(positions), dtype=torch.long)
        num_rows[row_starts(positions)] = 1
        num_rows = num_rows.cumsum(0)
        costs = torch.arange(1, len(positions) + 1) + (num_rows - 1) * _ROW_COST
        count = max(1, int(((costs <= budget) & (num_rows <= self.max_rows)).sum()))
        return count, int(costs[count - 1])

    def slots(self, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the slots of a request's tokens, given the numbers of its blocks. All are on the CPU."""
        return table[positions // self.block_tokens] * self.block_tokens + positions % self.block_tokens

    def run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        table: torch.Tensor,
        *,
        stop_before: str = "",
        observer: Observer | None = None,
        num_observed: int = 0,
        shift: int = 0,
    ) -> None:
        """Compute tokens of a request, and write their K and V to its blocks.

        Args:
            tokens: token ids ``[num_tokens]``, on the CPU like all tensors here.
            positions: their ascending positions in the request, int64.
            table: numbers of the request's blocks, int64.
            stop_before: name of the layer whose attention, and all that follows, is left out.
            observer: is called with Q of the last ``num_observed`` tokens, in each layer.
            num_observed: number of tokens.
            shift: is added to the positions for the model, but not for the slots and the attention.
        """
        # Some kernels expect short rows first.
        starts = row_starts(positions)
        lengths = starts.diff(append=torch.tensor([len(positions)]))
        order = lengths.repeat_interleave(lengths).argsort(stable=True)
        metadata, slots = self._metadata(positions[order], lengths.sort().values, table)
        context = set_forward_context(
            dict.fromkeys(self._layers, metadata),
            self._config,
            num_tokens=len(tokens),
            slot_mapping=dict.fromkeys(self._layers, slots),
        )
        self.stop_before = stop_before
        try:
            with context:
                if observer is not None:
                    rows = order.argsort()[len(order) - num_observed :].to(self.device)
                    self._watch(observer, rows)
                self._model(
                    input_ids=tokens[order].int().to(self.device),
                    positions=(positions[order] + shift).to(self.device),
                )
        except StoppedError:
            pass
        finally:
            self.stop_before = ""

    def _watch(self, observer: Observer, rows: torch.Tensor) -> None:
        """Show Q of the pass's layers. Layers are looked up in the context, also by compiled code."""

        def watched(name: str, layer: Any) -> _Shadow:
            def forward(shadow: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                observer(name, query[rows])
                return layer.impl.forward(layer, query, *args, **kwargs)

            return _Shadow(layer, impl=_Shadow(layer.impl, forward=forward))

        context = get_forward_context()
        shadows = {name: watched(name, layer) for name, layer in self._layers.items()}
        context.no_compile_layers = {**context.no_compile_layers, **shadows}

    def _metadata(
        self, positions: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor
    ) -> tuple[Any, torch.Tensor]:
        """Return the backend's metadata of rows with these lengths, and the slots."""
        ends = lengths.cumsum(0)
        query_start_loc = torch.cat((torch.zeros(1, dtype=torch.long), ends)).int()
        num_before = (positions[ends - 1] + 1).int()
        max_seq_len = int(num_before.max())
        blocks = table[: -(-max_seq_len // self.block_tokens)]
        if self._kernel_blocks > 1:
            blocks = (blocks[:, None] * self._kernel_blocks + torch.arange(self._kernel_blocks)).flatten()
        slots = self.slots(table, positions).to(self.device)
        common = CommonAttentionMetadata(
            query_start_loc=query_start_loc.to(self.device),
            query_start_loc_cpu=query_start_loc,
            seq_lens=num_before.to(self.device),
            num_reqs=len(lengths),
            num_actual_tokens=len(positions),
            max_query_len=int(lengths.max()),
            max_seq_len=max_seq_len,
            block_table_tensor=blocks.int().to(self.device).expand(len(lengths), -1).contiguous(),
            slot_mapping=slots,
            positions=positions.to(self.device),
            is_prefilling=torch.ones(len(lengths), dtype=torch.bool),
            seq_lens_cpu_upper_bound=num_before,
        )
        return self._builder.build(common_prefix_len=0, common_attn_metadata=common), slots


class _Shadow:
    """Stands for an object, with some of its attributes replaced."""

    def __init__(self, real: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def row_starts(positions: torch.Tensor) -> torch.Tensor:
    """Return the indices at which a run of successive positions begins."""
    return (positions.diff(prepend=positions[:1] - 2) != 1).nonzero().flatten()
