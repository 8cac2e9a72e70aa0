"""Blending with the engine's own model: stored KV is placed at new positions, and chosen tokens are computed.

A prompt is blended in these steps, each in as many forward passes as its slices need:

1. The ranks agree on the tokens whose stored KV all of them have placed.
2. If the selection needs it, a pass compares stored and fresh V in the first layers, or measures to which
   tokens the question attends.
3. A pass computes the selected tokens, the tokens without stored KV, the first tokens of the prompt and the
   question.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp

from lmcache_client.blend.rotation import Angles, Rotation
from lmcache_client.blend.selection import BEFORE_LAYERS, Candidates, selection_of, tokens_to_compute
from lmcache_client.core.blend_jobs import Blended, BlendJob
from lmcache_client.core.layout import KVCaches, Layout, page_views
from lmcache_client.errors import UnsupportedError
from lmcache_client.vllm.blend import self_test
from lmcache_client.vllm.blend.model import find_model, find_rotations
from lmcache_client.vllm.blend.pages import AttentionPages
from lmcache_client.vllm.blend.passes import Passes, StoppedError
from lmcache_client.vllm.blend.prompt import PromptPasses
from lmcache_client.vllm.blend.ranks import of_all_ranks, on_all_ranks
from lmcache_client.vllm.blend.taking import TakeJob

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_STAGING_BYTES = 128 << 20


class Blender:
    """Blends prompts in the KV of one rank.

    All methods run on the model thread, except ``place`` and ``take``. The ranks of a tensor parallel group
    must make the same calls of ``create`` and of the generators of ``blend``, in the same order.
    """

    def __init__(
        self,
        passes: Passes,
        layers: Mapping[str, Any],
        pages: Mapping[str, AttentionPages],
        rotations: dict[str, Rotation],
        staging: Layout,
        staged: Mapping[str, torch.Tensor],
    ) -> None:
        """``layers``, in the model's order, and ``pages`` have the same keys. ``staged``: each layer's pages
        in ``staging``."""
        self.passes, self.layers, self.pages, self.rotations = passes, layers, pages, rotations
        self.staging = staging
        """Blocks that stored rows are copied to before they are placed. They are no blocks of the engine."""
        self.staged = staged
        self.run_tokens = 1
        """Number of successive tokens that selections choose together."""
        device = passes.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @classmethod
    def create(
        cls,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        kv_caches: KVCaches,
        chunk_tokens: int,
    ) -> Blender:
        """Find the model, learn the layout of its KV, and test both.

        It runs once all weights are loaded, before the first request. Raises UnsupportedError, on all ranks,
        if blending is impossible; its text names the remedy.
        """
        blender = on_all_ranks(lambda: cls._assemble(vllm_config, kv_cache_config, kv_caches, chunk_tokens))
        self_test.run(blender, vllm_config)
        return blender

    @classmethod
    def _assemble(
        cls, vllm_config: Any, kv_cache_config: Any, kv_caches: KVCaches, chunk_tokens: int
    ) -> Blender:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.models.utils import extract_layer_index

        num_blocks, (group,) = kv_cache_config.num_blocks, kv_cache_config.kv_cache_groups
        known = vllm_config.compilation_config.static_forward_context
        layers = {name: known[name] for name in sorted(group.layer_names, key=extract_layer_index)}
        model, block_tokens = find_model(layers), group.kv_cache_spec.block_size
        with set_current_vllm_config(vllm_config):
            passes = Passes(vllm_config, group.kv_cache_spec, model, layers, num_blocks)
        views = page_views(group.layer_names, kv_caches, num_blocks)
        staging = _make_staging(views, chunk_tokens // block_tokens)
        numbers = {(view.data_ptr(), view.stride(0)): number for number, view in enumerate(views)}
        pages: dict[str, AttentionPages] = {}
        staged: dict[str, torch.Tensor] = {}
        for name, layer in layers.items():
            (view,) = page_views([name], kv_caches, num_blocks)
            try:
                pages[name] = AttentionPages(layer, view, block_tokens, next(iter(pages.values()), None))
            except UnsupportedError as error:
                raise UnsupportedError(f"layer {name}: {error}") from error
            staged[name] = staging.pages[numbers[view.data_ptr(), view.stride(0)]]
        return cls(passes, layers, pages, find_rotations(model, layers), staging, staged)

    @torch.inference_mode()
    def place(self, job: BlendJob, begin: int, end: int, start: int, slot: int) -> None:
        """Write staged KV into the request's blocks, with K rotated to its position in the prompt.

        The tokens from ``begin`` to ``end`` of the prompt belong to a document that starts at the prompt's
        token ``start``. Their KV is in successive token slots of the staging blocks, from ``slot`` on
        (block number times block size, plus the position in the block).

        It runs on the loader thread, also while the model runs, and returns once the KV is written.
        """
        block_tokens = self.passes.block_tokens
        first, offset = divmod(slot, block_tokens)
        count = end - begin
        last = -(-(slot + count) // block_tokens)
        positions = torch.arange(begin, end)
        angles: dict[int, Angles] = {}
        with self._side_stream():
            slots = self.passes.slots(torch.tensor(job.blocks), positions).to(self.passes.device)
            for name, pages in self.pages.items():
                staged = self.staged[name][first:last]
                k, v = (x[offset : offset + count] for x in (pages.k(staged), pages.v(staged)))
                rotation = self.rotations.get(name)
                if start and rotation is not None:
                    if id(rotation) not in angles:
                        angles[id(rotation)] = rotation.angles(positions - start, positions)
                    angles[id(rotation)].rotate(k)
                pages.write(k, v, slots)

    @torch.inference_mode()
    def take(self, job: TakeJob, chunks: Sequence[int], blocks: Sequence[Sequence[int]]) -> None:
        """Write chunks of a document to the first staging blocks, with K rotated to the document's positions.

        ``blocks`` has the blocks of each chunk. The work that writes them must have ended. It runs on the
        storer thread, also while the model runs, and returns once the KV is written.
        """
        size, per_row = self.passes.block_tokens, self.staging.blocks_per_row
        numbers, tokens = torch.tensor(chunks)[:, None], torch.arange(per_row * size)
        # Nobody reads the tokens behind the document. Their positions may exceed the rotary table.
        positions = (numbers * len(tokens) + tokens).flatten().clamp(max=job.num_tokens - 1)
        places = torch.arange(len(chunks))[:, None] * (per_row + 1) * size + job.start % size + tokens
        angles: dict[int, Angles] = {}
        with self._side_stream():
            table, rows = (x.flatten().to(self.passes.device) for x in (torch.tensor(blocks), places))
            for name, pages in self.pages.items():
                content = pages.bytes[table]
                k, v = pages.k(content)[rows], pages.v(content)[rows]
                if (rotation := self.rotations.get(name)) is not None:
                    if id(rotation) not in angles:
                        angles[id(rotation)] = rotation.angles(positions + job.start, positions)
                    angles[id(rotation)].rotate(k)
                pages.pack(k, v, self.staged[name][: len(chunks) * per_row])

    @contextlib.contextmanager
    def _side_stream(self) -> Iterator[None]:
        """Run kernels next to those of the model. Afterwards they have ended, also after an exception."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:  # until then they may write to the request's blocks
                self._stream.synchronize()

    @torch.inference_mode()
    def blend(
        self, job: BlendJob, is_placed: torch.Tensor, stored_at: torch.Tensor
    ) -> Generator[int, int, Blended]:
        """Compute chosen tokens of a prompt whose stored KV is placed, in slices.

        ``is_placed`` (bool ``[job.end]``, on the CPU) says which tokens this rank has placed, and
        ``stored_at`` (int64 ``[job.end]``, on the CPU) at which positions of their documents they were. The
        first call is ``next``, which yields 0. Each ``send(n)`` then runs at most one forward pass, of at
        most n tokens in cost (``Passes.fitting``), and yields its cost. With n < 1 it computes nothing. When
        the work is complete, ``send`` raises StopIteration with the result, also with n < 1. So send until 0
        is yielded.
        """
        is_placed = of_all_ranks(is_placed.to(torch.uint8), ReduceOp.MIN).bool()
        prompt = PromptPasses(job, is_placed, stored_at, self.passes, self.layers, self.pages)
        budget = yield 0
        selection = selection_of(job.selection, job.ratio, self.run_tokens)
        candidates = Candidates(prompt.is_reusable, stored_at, torch.tensor([0, job.end]))
        if selection.layer > BEFORE_LAYERS:
            deviation = torch.zeros(job.end)
            budget = yield from prompt.compare(selection.layer, deviation, budget)
            of_all_ranks(deviation, ReduceOp.SUM)
            candidates = replace(candidates, deviation=deviation.where(prompt.is_reusable, 0))
        if selection.reads_attention:
            weights = torch.zeros(len(self.layers), job.end)
            budget = yield from prompt.observe(weights, budget)
            # MAX may drop a NaN, which is damaged KV. No weight is infinite.
            attention = of_all_ranks(weights.nan_to_num_(torch.inf), ReduceOp.MAX).sum(0)
            attention = attention.where(attention.isfinite(), torch.nan)
            candidates = replace(candidates, attention=attention)
            del weights, attention
        is_chosen = prompt.choose(tokens_to_compute(selection, candidates))
        del candidates
        yield from prompt.compute_chosen(is_chosen, budget)
        return Blended(
            reused=int((prompt.is_reusable & ~is_chosen).sum()),
            recomputed=int((prompt.is_reusable & is_chosen).sum()),
            missing=int((~prompt.is_reusable & is_chosen).sum()),
        )

    def wait_for_layer_load(self, layer_name: str) -> None:
        """End the pass that runs if it needs no more layers: raises an exception that ``blend`` catches.

        The connector calls it in its method of this name. Outside of passes it does nothing.
        """
        if self.passes.stop_before == layer_name:
            raise StoppedError


def _make_staging(views: list[torch.Tensor], blocks_per_row: int) -> Layout:
    row_bytes = blocks_per_row * sum(view.shape[1] for view in views)
    num_blocks = max(1, _STAGING_BYTES // row_bytes) * blocks_per_row
    pages = (torch.zeros(num_blocks, view.shape[1], dtype=torch.uint8, device=view.device) for view in views)
    return Layout(tuple(pages), blocks_per_row)
