"""One rank of a simulated engine: its KV, vLLM's runner hooks around its steps, and the connector's worker
side.

Every step compares all KV that the model would read with the expected KV, and overwrites the blocks that may
be reused from then on, so that a late copy is detected. All of that happens in the order of the device's
compute stream (``device``).
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest import mock

import numpy as np
import torch
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from lmcache_client.vllm.connector import LMCacheClusterConnector
from tests.harness.client.fake_model import CELL, Cells, layer_cells
from tests.harness.sim.config import SimGroup, SimSettings, make_cache_config
from tests.harness.sim.device import make_device

POISON = 0xA5
NULL_BLOCK = 0
Tables = tuple[list[int], ...]


class Computation(NamedTuple):
    """The work of a step for one request."""

    name: str
    tables: Tables
    """Block tables, by KV group."""
    start: int
    """The first computed token."""
    end: int
    cells: Cells
    """KV of at least all tokens before ``end``."""


@dataclass
class Step:
    """The work of a step for all ranks."""

    output: SchedulerOutput
    computations: list[Computation]
    sampled: dict[str, list[int]]
    handed_out: list[int]
    """Blocks with new owners."""
    free: list[int]
    """Blocks whose content no copy may read."""


class SimRank:
    """One simulated rank. The module's docstring describes it.

    ``place`` is the pipeline stage and the tensor-parallel rank. ``report`` receives descriptions of wrong
    reads.
    """

    def __init__(
        self,
        config: Any,
        settings: SimSettings,
        place: tuple[int, int],
        report: Callable[[str], None],
        part: int = 0,
    ) -> None:
        self.settings, self.place, self.part, self.num_reads = settings, place, part, 0
        self._config, self._report = config, report
        self._step: Step | None = None
        cache = make_cache_config(config, settings, stage=place[0])
        self._device = make_device()
        kv_caches = self._device.allocate(cache, settings.layout)
        self.pages = _pages(cache, kv_caches)
        self.pages[:] = POISON
        self._memory = [
            [_cells(self.pages[layer], group) for layer in range(group.num_layers)]
            for group in settings.groups
        ]
        self.worker = LMCacheClusterConnector(config, KVConnectorRole.WORKER, cache)
        self._bind, self.worker.bind_connector_metadata = self.worker.bind_connector_metadata, self._begin
        self.hooks: ActiveKVConnector | None = None
        with self._in_place():
            if settings.runner == 2:
                self.hooks = ActiveKVConnector(config, kv_caches)
            else:
                self.worker.register_kv_caches(kv_caches)
            self.handshake = self.worker.get_handshake_metadata()

    def synchronize(self) -> None:
        """Wait until all work of the device is done."""
        self._device.synchronize()

    def close(self) -> None:
        self._device.release_kernels()
        self.worker.shutdown()
        self._device.close()

    def execute(self, step: Step) -> ModelRunnerOutput:
        """Run a step, like execute_model and sample_tokens of the runner."""
        self._step = step
        self._device.release_kernels()  # kernels of the last step run only now: the host was ahead of them
        with self._in_place():
            run = self.execute_v2 if self.hooks is not None else self._execute_v1
            return run(step)

    def _execute_v1(self, step: Step) -> ModelRunnerOutput:
        output = step.output
        self.worker.handle_preemptions(output.kv_connector_metadata)
        is_speculative = self._config.speculative_config is not None
        if not output.total_num_scheduled_tokens:
            return KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self._config)
        with (
            set_forward_context(None, self._config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(
                output, defer_finalize=is_speculative
            ) as transferred,
        ):
            self.forward(step)
        if is_speculative:
            KVConnectorModelRunnerMixin.finalize_kv_connector()
        return ran(step, transferred)

    def execute_v2(self, step: Step) -> ModelRunnerOutput:
        """Run a step like the second runner. Public, because a test runs the hooks in another order."""
        hooks, output = self.hooks, step.output
        assert hooks is not None
        if not output.total_num_scheduled_tokens:
            return hooks.no_forward(output)
        hooks.pre_forward(output)
        self.forward(step)
        if hasattr(hooks, "finish_forward"):  # not before 0.30
            hooks.finish_forward()
        return ran(step, hooks.post_forward(output.finished_req_ids))

    def forward(self, step: Step) -> None:
        """Launch the model's work."""
        self._device.launch(partial(self._compute, step))

    def _compute(self, step: Step) -> None:
        """Read and write KV like the model."""
        self.pages[:, step.free] = POISON
        for source, destination in step.output.kv_cache_block_copies or ():
            self.pages[:, destination] = self.pages[:, source]
        for computation in step.computations:  # states are overwritten by the computation that reads them
            self._check_reads(computation, of_states=True)
        for computation in step.computations:
            self._write(computation)
        for computation in step.computations:  # attention also reads KV that others compute in the same step
            self._check_reads(computation, of_states=False)
        if (self.pages[:, NULL_BLOCK] != POISON).any():
            self._report("something was written to the null block")

    @contextmanager
    def _in_place(self):
        """Set vLLM's globals as in this rank's process."""
        stage, rank = self.place
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        pipeline = SimpleNamespace(rank_in_group=stage)
        with (
            mock.patch.object(parallel_state, "get_pp_group", return_value=pipeline),
            mock.patch.object(parallel_state, "get_tensor_model_parallel_rank", return_value=rank),
        ):
            yield

    def _begin(self, metadata: KVConnectorMetadata) -> None:
        """Bind the metadata. Copies of earlier steps have ended or are fenced."""
        assert self._step is not None
        self._device.launch(partial(self._overwrite, self._step.handed_out))
        self._bind(metadata)

    def _overwrite(self, blocks: list[int]) -> None:
        self.pages[:, blocks] = POISON

    def _layers(self, number: int, cells: Cells) -> Sequence[tuple[Cells, Cells]]:
        """For each layer of a group: its memory, and the expected KV of these tokens."""
        stage, rank = self.place
        shard, first = rank // self.settings.replicas, stage * self.settings.groups[number].num_layers
        return [
            (memory, layer_cells(cells, first + layer, number, shard)[:, None])
            for layer, memory in enumerate(self._memory[number])
        ]

    def _check_reads(self, computation: Computation, *, of_states: bool) -> None:
        name, tables, num_computed, _, cells = computation
        for number, (group, table) in enumerate(zip(self.settings.groups, tables, strict=True)):
            first = group.read_from(num_computed)
            if (group.kind == "state") is not of_states or first == num_computed:
                continue
            self.num_reads += num_computed - first
            places = _places(group, table, first, num_computed)
            for layer, (memory, expected) in enumerate(self._layers(number, cells[first:num_computed])):
                wrong = (memory[places] != expected).any(axis=(1, 2))
                if wrong.any():
                    tokens = f"{wrong.sum()} of {len(wrong)} tokens from {first + int(wrong.argmax())} on"
                    location = f"{group.kind} group {number} layer {layer} rank {self.place}"
                    self._report(f"{name} {location}: {tokens}")

    def _write(self, computation: Computation) -> None:
        name, tables, start, end, cells = computation
        for number, (group, table) in enumerate(zip(self.settings.groups, tables, strict=True)):
            first = end - 1 if group.kind == "state" else start
            places = _places(group, table, first, end)
            assert NULL_BLOCK not in places[0], f"{name}: no block to write group {number}'s KV to"
            for memory, kv in self._layers(number, cells[first:end]):
                memory[places] = kv


def _pages(cache: KVCacheConfig, kv_caches: dict[str, torch.Tensor]) -> Cells:
    """All of the rank's KV as ``[layers, blocks, bytes of a page]``. Groups share the memory."""
    tensor = max(cache.kv_cache_tensors, key=lambda tensor: len(tensor.layers))
    page_bytes = cache.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    raw = torch.empty(0, dtype=torch.uint8).set_(kv_caches[tensor.layers[0]].untyped_storage())
    shape = len(tensor.layers), cache.num_blocks, page_bytes
    pages = np.lib.stride_tricks.as_strided(raw.numpy(), shape, (tensor.layer_stride, tensor.block_stride, 1))
    return cast("Cells", pages)


def _cells(page: Cells, group: SimGroup) -> Cells:
    """A layer's KV as ``[blocks, tokens, times, CELL]``. A state fills its block."""
    if group.kind == "state":
        return page.reshape(len(page), 1, -1, CELL)
    return page.reshape(len(page), group.block_tokens, -1, CELL)[:, :, :1]


def _places(group: SimGroup, table: list[int], start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of the tokens, and their offsets within."""
    positions = np.arange(start, end)
    offsets = positions % group.block_tokens * (group.kind != "state")
    return np.asarray(table, np.int64)[positions // group.block_tokens], offsets


def ran(step: Step, transferred: KVConnectorOutput | None) -> ModelRunnerOutput:
    """The runner's output of a step."""
    names = list(step.sampled)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=list(step.sampled.values()),
        kv_connector_output=transferred,
    )
