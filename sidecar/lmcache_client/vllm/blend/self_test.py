"""The test at the start of an engine that decides whether its model and attention backend can be blended.

It overwrites a few blocks, whose bytes it restores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp

from lmcache_client.core.blend_jobs import BlendJob
from lmcache_client.errors import UnsupportedError
from lmcache_client.vllm.blend.ranks import go_on_together, of_all_ranks, on_all_ranks

if TYPE_CHECKING:
    from lmcache_client.vllm.blend.blender import Blender

_MAX_TOKENS = 64
_SHIFT = 777
"""Position at which the tokens are computed a second time, unless the model's length is smaller."""
_ROWS = (0, 5), (7, 8), (20, 30), (40, 63)
"""Runs of tokens that are computed in one pass."""
_RUN_TOKENS = 16
_MAX_SLOWDOWN = 1.5
"""Time for single tokens compared with runs from which on runs are selected, although they cost accuracy."""
_TIMED_TOKENS, _TIMED_LENGTH = 256, 4096
_Layers = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""K and V of all layers."""


@torch.inference_mode()
def run(blender: Blender, vllm_config: Any) -> None:
    """Test the layout of pages, the rotation of K and passes of several rows.

    Raises UnsupportedError, on all ranks, if the engine can't be blended.
    """
    test = on_all_ranks(lambda: SelfTest(blender, vllm_config))
    try:
        on_all_ranks(test.check_layout)
        on_all_ranks(test.check_rotation)
        on_all_ranks(test.check_rows)
        on_all_ranks(test.check_reads)
        if blender.passes.device.type == "cuda":  # times on a CPU depend on its other work
            blender.run_tokens = test.choose_run_tokens()
    finally:
        test.restore()


class SelfTest:
    """The tests, which share the KV of one prompt."""

    def __init__(self, blender: Blender, vllm_config: Any) -> None:
        self._blender, passes = blender, blender.passes
        size = passes.block_tokens
        num_blocks = len(next(iter(blender.pages.values())).bytes)
        model = vllm_config.model_config
        self._count = min(_MAX_TOKENS, model.max_model_len - size, (num_blocks - 1) * size)
        shift = min(_SHIFT, model.max_model_len - self._count) // size * size
        if self._count < _ROWS[-1][1] or shift < size:
            raise UnsupportedError(
                "the engine has too few blocks or tokens for a test; increase --max-model-len or"
                " --gpu-memory-utilization to blend"
            )
        self._shift = shift
        self._positions = torch.arange(self._count)
        self._vocab_size = model.get_vocab_size()
        self._max_length = model.max_model_len
        # vLLM's block 0 stands for no block.
        self._table = torch.arange(1, 1 - (-self._count // size))
        self._blocks = self._table.to(passes.device)
        self._saved = {name: pages.bytes[self._blocks] for name, pages in blender.pages.items()}
        # Rounding errors add up over the layers: 0.027 in 30 layers of bfloat16. Wrong angles exceed 0.4.
        eps = torch.finfo(next(iter(blender.layers.values())).kv_cache.dtype).eps
        self._max_error = max(0.01, 12 * eps)

    def restore(self) -> None:
        """Give the blocks back their bytes."""
        for name, saved in self._saved.items():
            self._blender.pages[name].bytes[self._blocks] = saved

    def check_layout(self) -> None:
        """Check that K and V that a layer writes can be read, also from a staging block."""
        slots = self._slots(self._positions)
        for name, pages in self._blender.pages.items():
            k, v = (torch.randn_like(x[: self._count]) for x in self._read(name))
            pages.write(k, v, slots)
            staged = self._stage(name)
            is_same = torch.equal(pages.k(staged)[: self._count], k)
            if not is_same or not torch.equal(pages.v(staged)[: self._count], v):
                raise UnsupportedError(f"layer {name} does not return the K and V that were written")

    def check_rotation(self) -> None:
        """Check that K moved from one position to another is K computed there, in each layer."""
        blender, count, shift = self._blender, self._count, self._shift
        self._compute(self._positions)
        for name in blender.pages:
            self._stage(name)
        self._compute(self._positions, shift=shift)
        fresh = self._all()
        for name, (k, _) in fresh.items():
            # Some models have a rotary embedding that they do not use in all layers.
            if _error(blender.pages[name].k(self._stage_view(name))[:count], k) < self._max_error:
                blender.rotations.pop(name, None)
        padding = shift // blender.passes.block_tokens
        job = BlendJob("", (), (0,) * padding + tuple(self._table.tolist()), 0, 0, 0, 0, (), "", 0.0)
        blender.place(job, shift, shift + count, shift, 0)
        self._compare(fresh, "its K can't be moved to another position")

    def check_rows(self) -> None:
        """Check that a pass of several rows computes the same KV as a pass of all tokens."""
        self._compute(self._positions)
        expected = self._all()
        chosen = torch.cat([self._positions[begin:end] for begin, end in _ROWS])
        for name, pages in self._blender.pages.items():
            k, v = (torch.zeros_like(x[: len(chosen)]) for x in expected[name])
            pages.write(k, v, self._slots(chosen))
        shapes: dict[str, int] = {}
        self._compute(chosen, observer=lambda name, q: shapes.update({name: q.dim()}), num_observed=1)
        self._compare(expected, "a pass over parts of a prompt computes other KV")
        if list(shapes.items()) != [(name, 3) for name in self._blender.layers]:
            raise UnsupportedError("the model's attention does not show its queries, layer by layer")

    def check_reads(self) -> None:
        """Check that a pass reads the KV before its tokens: other KV in the prompt's blocks has an effect."""
        self._compute(self._positions)
        expected = self._all()
        before, last = self._positions.tensor_split([_ROWS[-1][0]])
        for name, pages in self._blender.pages.items():
            k, v = (torch.full_like(x[: len(before)], 8.0) for x in expected[name])
            pages.write(k, v, self._slots(before))
        self._compute(last)
        name = list(self._blender.layers)[-1]
        k, fresh = expected[name][0][len(before) :], self._read(name)[0][len(before) :]
        if len(expected) > 1 and not _error(fresh, k) > self._max_error:  # no layer follows the first one
            raise UnsupportedError("the attention does not read the KV that is before the tokens of a pass")

    def choose_run_tokens(self) -> int:
        """Return the number of successive tokens to select together: 1, or 16 if single tokens cost more.

        Kernels of GPUs read all KV before a row for each row. This was not yet measured on a GPU.
        """
        length = min(_TIMED_LENGTH, self._max_length) // _TIMED_TOKENS * _TIMED_TOKENS
        if length < 2 * _TIMED_TOKENS:
            return 1
        num_blocks = length // self._blender.passes.block_tokens + 1
        table = self._table.repeat(num_blocks // len(self._table) + 1)  # the content does not matter
        runs = torch.arange(0, length, length // _TIMED_TOKENS * _RUN_TOKENS)[:, None] + torch.arange(
            _RUN_TOKENS
        )
        singles = torch.arange(0, length, length // _TIMED_TOKENS)
        works = [partial(self._compute, positions, table) for positions in (singles, runs.flatten())]
        device = self._blender.passes.device
        seconds = on_all_ranks(lambda: torch.tensor([_seconds(work, device) for work in works]))
        single, run = of_all_ranks(seconds, ReduceOp.MAX).tolist()
        return _RUN_TOKENS if single > _MAX_SLOWDOWN * run else 1

    def _compute(self, positions: torch.Tensor, table: torch.Tensor | None = None, **options: Any) -> None:
        passes = self._blender.passes
        while len(positions):
            part = positions[: passes.fitting(positions)[0]]
            tokens = (part * 7919 + 1) % self._vocab_size
            blocks = self._table if table is None else table
            go_on_together(partial(passes.run, tokens, part, blocks, **options))
            positions = positions[len(part) :]

    def _slots(self, positions: torch.Tensor) -> torch.Tensor:
        passes = self._blender.passes
        return passes.slots(self._table, positions).to(passes.device)

    def _stage(self, name: str) -> torch.Tensor:
        """Copy the blocks to the first staging blocks, as a load of stored rows does."""
        staged = self._stage_view(name)
        staged.copy_(self._blender.pages[name].bytes[self._blocks])
        return staged

    def _stage_view(self, name: str) -> torch.Tensor:
        return self._blender.staged[name][: len(self._table)]

    def _read(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        pages = self._blender.pages[name]
        content = pages.bytes[self._blocks]
        return pages.k(content)[: self._count], pages.v(content)[: self._count]

    def _all(self) -> _Layers:
        return {name: self._read(name) for name in self._blender.pages}

    def _compare(self, expected: _Layers, reason: str) -> None:
        for name, parts in expected.items():
            error = max(_error(x, y) for x, y in zip(self._read(name), parts, strict=True))
            if not error < self._max_error:
                raise UnsupportedError(f"layer {name}: {reason} (error {error:.2g})")


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    """Return the shortest time of a few calls, after a first one."""
    times = []
    for _ in range(4):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _error(x: torch.Tensor, expected: torch.Tensor) -> float:
    return float((x.float() - expected.float()).norm() / expected.float().norm())
