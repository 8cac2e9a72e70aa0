"""vLLM's own Scheduler, KVCacheManager and runner hooks with our connector, over a model that is not there.

One ``SimEngine`` is an engine without a process and without threads of its own: ``step`` does what vLLM's
EngineCore does in one. The connector's two sides are the real ones and attach to a real sidecar. What
differs between vLLM's two model runners, the order of the connector's hooks, is run by vLLM's own classes.

Every step compares all KV that attention would read with what the tokens say (``wrong_reads``), and
overwrites the blocks that others may have from then on: a copy that comes too late shows.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheLayout
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache

from lmcache.engines.vllm.connector import LMCacheClusterConnector
from tests.harness.fake_model import CELL, Cells, Content, TokenChain, layer_cells
from tests.harness.sim_config import SimGroup, SimSettings, make_configs, model_runner

POISON = 0xA5
NULL_BLOCK = 0
Tables = tuple[list[int], ...]
_MAX_MEDIA_TOKENS = 4096
_NAMES = itertools.count()


@dataclass
class Result:
    """What a request brought so far."""

    tokens: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    finish_reason: str | None = None


@dataclass
class _Batch:
    """A step that was scheduled: each request's block tables at that time."""

    output: SchedulerOutput
    tables: dict[str, Tables]
    """Per KV group."""


class SimEngine:
    """See the module."""

    def __init__(self, socket: str, settings: SimSettings = SimSettings()) -> None:  # noqa: B008  # frozen
        self.settings = settings
        self.weights = b""
        self.results: dict[str, Result] = {}
        self.wrong_reads: list[str] = []
        self.num_reads = 0
        self.num_preemptions = 0
        self.drafter = right_drafts
        self._name = next(_NAMES)
        self._chains: dict[str, TokenChain] = {}
        self._contents: dict[str, Content] = {}
        self._drafts: dict[str, list[int]] = {}
        self._batches: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        config, cache, block, hash_block = make_configs(settings, socket)
        self._config = config
        self._hasher = get_request_block_hasher(hash_block, sha256_cbor)
        scheduler_class = AsyncScheduler if settings.is_async else Scheduler
        with model_runner(settings.runner):
            self.scheduler = scheduler_class(
                config, cache, StructuredOutputManager(config), block, hash_block, log_stats=True
            )
            self._num_batches = config.max_concurrent_batches
        # The tiny model takes no media.
        self.scheduler.max_num_encoder_input_tokens = _MAX_MEDIA_TOKENS
        self.scheduler.encoder_cache_manager = EncoderCacheManager(_MAX_MEDIA_TOKENS)
        self._handed_out: list[int] = []
        self._watch_blocks()
        kv_caches = allocate_kv_cache(cache, torch.device("cpu"), KVCacheLayout[settings.layout])
        self._pages = _pages(cache, kv_caches)
        self._pages[:] = POISON
        self._memory = [
            [_cells(self._pages[layer], group) for layer in range(group.num_layers)]
            for group in settings.groups
        ]
        self.worker = LMCacheClusterConnector(config, KVConnectorRole.WORKER, cache)
        self._start_worker(kv_caches)

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()

    def add(
        self,
        tokens: Sequence[int],
        max_tokens: int = 1,
        salt: str | None = None,
        *,
        name: str | None = None,
        content: Content | None = None,
        **fields: Any,
    ) -> str:
        """A request arrives; its name. ``fields`` are more of vLLM's, ``content`` is what they mean to the
        model. A ``name`` of before: the session goes on."""
        name = name or f"engine{self._name}-{len(self.results)}"
        self.results.setdefault(name, Result())
        self._contents[name] = {**self._contents.get(name, {}), **(content or {})}
        self.scheduler.add_request(
            Request(
                request_id=name,
                **({"prompt_token_ids": list(tokens), "cache_salt": salt} | fields),
                sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                pooling_params=None,
                block_hasher=self._hasher,
            )
        )
        return name

    def abort(self, name: str) -> None:
        """The client went away."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def reset(self, new_weights: bytes) -> bool:
        """As before a weight update; whether the engine was ready for one. Then the weights are new."""
        while self._batches:  # vLLM pauses first, and can't reset what is still being computed
            self._update(*self._batches.popleft())
        try:
            is_reset = self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        except RuntimeError:  # vLLM can't, while a request waits for its load
            return False
        if is_reset:
            self.weights = new_weights
        return bool(is_reset)

    def forget(self, *, also_of_running: bool = False) -> None:
        """Empty the engine's own prefix cache, so that only the connector can bring KV."""
        while also_of_running and self._batches:  # vLLM pauses first
            self._update(*self._batches.popleft())
        assert self.scheduler.reset_prefix_cache(reset_running_requests=also_of_running)

    def run(self, *names: str, timeout: float = 20.0) -> None:
        """Step until these requests ended; without names, until nothing is left to do: no block is held."""
        deadline = time.monotonic() + timeout
        while (
            any(self.results[name].finish_reason is None for name in names)
            if names
            else self.scheduler.has_requests() or self._batches
        ):
            if time.monotonic() > deadline:
                raise AssertionError(f"does not end: {list(self.scheduler.requests.values())}")
            self.step()

    def leftovers(self) -> dict[str, object]:
        """What the connector still knows of requests; nothing, when all ended and their stores did."""
        scheduler, worker = self.scheduler.connector._scheduler, self.worker._worker
        known = {
            "states": scheduler._states,
            "jobs": scheduler._stores._jobs,
            "computing": scheduler._computing._states,
            "held": worker._held,
            "stores": worker._stores,
            "loading": worker._loading,
        }
        return {name: dict.fromkeys(what) for name, what in known.items() if what}

    def step(self) -> bool:
        """One step of the engine's loop; whether something was computed."""
        if not self.scheduler.has_requests() and not self._batches:
            return False
        num_scheduled = 0
        if self.scheduler.has_requests():
            batch = self._schedule()
            num_scheduled = batch.output.total_num_scheduled_tokens
            self._batches.append((batch.output, self._execute(batch)))
            if len(self._batches) < self._num_batches and num_scheduled:
                return True
        self._update(*self._batches.popleft())
        if not num_scheduled:
            time.sleep(0.0005)  # EngineCore's own idle step
        return bool(num_scheduled)

    # ---- the scheduler's side ----

    def _schedule(self) -> _Batch:
        output = self.scheduler.schedule()
        manager = self.scheduler.kv_cache_manager
        tables = {name: manager.get_block_ids(name) for name in output.num_scheduled_tokens}
        self.num_preemptions += len(output.preempted_req_ids or ())
        return _Batch(output, tables)

    def _update(self, output: SchedulerOutput, ran: ModelRunnerOutput) -> None:
        for outputs in self.scheduler.update_from_output(output, ran).values():
            for answer in outputs.outputs:
                result = self.results[answer.request_id]
                result.tokens += answer.new_token_ids
                if answer.prefill_stats is not None:
                    result.num_cached_tokens = answer.prefill_stats.num_cached_tokens
                if answer.finish_reason is not None:
                    result.finish_reason = str(answer.finish_reason)
        if not self.settings.is_async and output.total_num_scheduled_tokens:
            drafts = {name: self._drafts[name] for name in ran.req_ids if name in self._drafts}
            self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))
        for name in set(self.results) - set(self.scheduler.requests):
            if self.results[name].finish_reason is None:
                self.results[name].finish_reason = "aborted"

    # ---- the runner's side ----

    def _start_worker(self, kv_caches: dict[str, torch.Tensor]) -> None:
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        self._bind, self.worker.bind_connector_metadata = (
            self.worker.bind_connector_metadata,
            self._begin_step,
        )
        self._hooks: ActiveKVConnector | None = None
        if self.settings.runner == 2:
            self._hooks = ActiveKVConnector(self._config, kv_caches)
        else:
            self.worker.register_kv_caches(kv_caches)
        metadata = self.worker.get_handshake_metadata()
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): metadata})

    def _watch_blocks(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        allocate = pool.get_new_blocks

        def watched(num_blocks: int) -> list[KVCacheBlock]:
            blocks = allocate(num_blocks)
            self._handed_out += [block.block_id for block in blocks]
            return blocks

        pool.get_new_blocks = watched

    def _begin_step(self, metadata: KVConnectorMetadata) -> None:
        """The connector knows of the step, and the last one's copies are over or fenced: from here on blocks
        are their new owners'."""
        handed_out, self._handed_out = self._handed_out, []
        self._pages[:, handed_out] = POISON
        self._bind(metadata)

    def _execute(self, batch: _Batch) -> ModelRunnerOutput:
        kv_transfer_state._KV_CONNECTOR_AGENT = self.worker
        run = self._execute_v2 if self._hooks is not None else self._execute_v1
        return run(batch)

    def _execute_v1(self, batch: _Batch) -> ModelRunnerOutput:
        """As GPUModelRunner.execute_model and sample_tokens."""
        output = batch.output
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
            sampled = self._forward(batch)
        if is_speculative:
            KVConnectorModelRunnerMixin.finalize_kv_connector()
        return ran(sampled, transferred)

    def _execute_v2(self, batch: _Batch) -> ModelRunnerOutput:
        """As the second runner's execute_model and sample_tokens."""
        hooks, output = self._hooks, batch.output
        assert hooks is not None
        if not output.total_num_scheduled_tokens:
            return hooks.no_forward(output)
        hooks.pre_forward(output)
        sampled = self._forward(batch)
        hooks.finish_forward()
        return ran(sampled, hooks.post_forward(output.finished_req_ids))

    def _forward(self, batch: _Batch) -> dict[str, list[int]]:
        """Read and write KV as the model does, then sample and draft; tokens by request."""
        self._poison_free_blocks()
        output = batch.output
        for source, destination in output.kv_cache_block_copies or ():
            self._pages[:, destination] = self._pages[:, source]
        for name in output.finished_req_ids:
            self._chains.pop(name, None)
            self._drafts.pop(name, None)
        self._begin_requests(output)
        starts = {name: self._chains[name].num_computed for name in output.num_scheduled_tokens}
        for name, start in starts.items():  # states are written over by what reads them
            self._check_reads(name, batch.tables[name], start, of_states=True)
        sampled = {
            name: self._compute(name, batch.tables[name], num_tokens, output)
            for name, num_tokens in output.num_scheduled_tokens.items()
        }
        for name, start in starts.items():  # attention also reads what others compute in the same step
            self._check_reads(name, batch.tables[name], start, of_states=False)
        if (self._pages[:, NULL_BLOCK] != POISON).any():
            self.wrong_reads.append("something was written to the null block")
        return sampled

    def _begin_requests(self, output: SchedulerOutput) -> None:
        """Take new and resumed requests in, in either runner's form; for the others check where they are."""
        cached = output.scheduled_cached_reqs
        begun = [
            (new.req_id, new.prefill_token_ids or _prompt(new), new.num_computed_tokens)
            for new in output.scheduled_new_reqs
        ]
        for name, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids:
                begun.append((name, cached.all_token_ids[name], num_computed))
            elif not self.settings.is_async:  # then drafts count as accepted until their step is processed
                assert self._chains[name].num_computed == num_computed, name
        for name, tokens, num_computed in begun:
            self._chains[name] = TokenChain(tokens, self.weights, self._contents[name])
            self._chains[name].num_computed = num_computed
            self._drafts.pop(name, None)

    def _check_reads(self, name: str, tables: Tables, num_computed: int, *, of_states: bool) -> None:
        cells = self._chains[name].cells()
        for number, (group, table) in enumerate(zip(self.settings.groups, tables, strict=True)):
            first = group.read_from(num_computed)
            if (group.kind == "state") is not of_states or first == num_computed:
                continue
            self.num_reads += num_computed - first
            places = _places(group, table, first, num_computed)
            for layer, memory in enumerate(self._memory[number]):
                expected = layer_cells(cells[first:num_computed], layer, number)
                wrong = (memory[places] != expected[:, None]).any(axis=(1, 2))
                if wrong.any():
                    where = f"{wrong.sum()} of {len(wrong)} tokens from {first + int(wrong.argmax())} on"
                    self.wrong_reads.append(f"{name} {group.kind} group {number} layer {layer}: {where}")

    def _compute(self, name: str, tables: Tables, num_tokens: int, output: SchedulerOutput) -> list[int]:
        chain, start = self._chains[name], self._chains[name].num_computed
        drafts = output.scheduled_spec_decode_tokens.get(name, [])
        if (
            drafts and drafts[0] < 0
        ):  # placeholders: the runner may have drafts; those it lacks are never right
            drafts = (self._drafts.get(name, []) + [0] * len(drafts))[: len(drafts)]
        end = start + num_tokens
        is_sampling = end - len(drafts) >= len(chain.tokens)
        cells = chain.cells(drafts)
        for number, (group, table) in enumerate(zip(self.settings.groups, tables, strict=True)):
            first = end - 1 if group.kind == "state" else start
            places = _places(group, table, first, end)
            assert NULL_BLOCK not in places[0], f"{name}: no block to write group {number}'s KV to"
            for layer, memory in enumerate(self._memory[number]):
                memory[places] = layer_cells(cells[first:end], layer, number)[:, None]
        chain.num_computed = end - len(drafts)
        if not is_sampling:
            return []
        sampled = chain.continuation(drafts)
        chain.num_computed += len(sampled) - 1
        chain.tokens += sampled
        if self.settings.num_drafts:
            self._drafts[name] = self.drafter(chain, self.settings.num_drafts)
        return sampled

    def _poison_free_blocks(self) -> None:
        """With one group of full attention blocks are given back when no copy reads them, so nothing may rely
        on what is in a free one; the blocks of others slide out under copies, see ``_begin_step``.
        """
        if self.settings.has_one_full_group:
            pool = self.scheduler.kv_cache_manager.block_pool
            free = [block.block_id for block in pool.blocks if not block.ref_cnt and block.block_hash is None]
            self._pages[:, free] = POISON


def _prompt(new: NewRequestData) -> list[int]:
    """Tokens; of embeddings alone, as many that mean nothing."""
    return new.prompt_token_ids if new.prompt_token_ids is not None else [0] * len(new.prompt_embeds)


def right_drafts(chain: TokenChain, num_drafts: int) -> list[int]:
    """What will be sampled: every draft is accepted."""
    ahead = TokenChain(chain.tokens, chain.weights, chain.content)
    while len(ahead.tokens) < len(chain.tokens) + num_drafts:
        ahead.tokens += ahead.continuation()
    return ahead.tokens[len(chain.tokens) :]


def _pages(cache: KVCacheConfig, kv_caches: dict[str, torch.Tensor]) -> Cells:
    """All of the engine's KV; ``[layers, blocks, bytes of a page]``, the same memory for all groups."""
    tensor = max(cache.kv_cache_tensors, key=lambda tensor: len(tensor.layers))
    page_bytes = cache.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    raw = torch.empty(0, dtype=torch.uint8).set_(kv_caches[tensor.layers[0]].untyped_storage())
    shape = len(tensor.layers), cache.num_blocks, page_bytes
    pages = np.lib.stride_tricks.as_strided(raw.numpy(), shape, (tensor.layer_stride, tensor.block_stride, 1))
    return cast("Cells", pages)


def _cells(page: Cells, group: SimGroup) -> Cells:
    """Where a layer's KV is; ``[blocks, tokens, times, CELL]``. A state fills its block."""
    if group.kind == "state":
        return page.reshape(len(page), 1, -1, CELL)
    return page.reshape(len(page), group.block_tokens, -1, CELL)[:, :, :1]


def _places(group: SimGroup, table: list[int], start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens' blocks and the place within."""
    positions = np.arange(start, end)
    offsets = positions % group.block_tokens * (group.kind != "state")
    return np.asarray(table, np.int64)[positions // group.block_tokens], offsets


def ran(sampled: dict[str, list[int]], transferred: KVConnectorOutput | None) -> ModelRunnerOutput:
    names = list(sampled)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=list(sampled.values()),
        kv_connector_output=transferred,
    )
