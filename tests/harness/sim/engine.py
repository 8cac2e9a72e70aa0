"""vLLM's own Scheduler, KVCacheManager and runner hooks with this project's connector, over a simulated
model.

One ``SimEngine`` is an engine without a process or threads: ``step`` does what vLLM's EngineCore does in one
step. Both sides of the connector are real and attach to a real sidecar. vLLM's own classes run the order of
the connector's hooks, which differs between vLLM's two model runners.

Every rank compares all KV that the model would read with the expected KV (``rank``), and reports
differences in ``wrong_reads``.
"""

import copy
import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from lmcache_client.vllm.connector import LMCacheClusterConnector
from tests.harness.client.fake_model import Content, TokenChain
from tests.harness.sim.config import SimSettings, make_configs, model_runner, part_config
from tests.harness.sim.parts import IDLE_SECONDS, STEP_SECONDS, PartLink, PartWaits, StepClock, carried
from tests.harness.sim.rank import Computation, SimRank, Step

_MAX_MEDIA_TOKENS = 4096
_NAMES = itertools.count()


@dataclass
class Result:
    """Results of a request so far."""

    tokens: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    finish_reason: str | None = None


class SimEngine:
    """One simulated engine. The module's docstring describes it."""

    def __init__(
        self,
        socket: str,
        settings: SimSettings = SimSettings(),  # noqa: B008  # frozen
        further_sockets: Sequence[str] = (),
    ) -> None:
        """Each part of the engine has a sidecar. ``socket`` is that of the first part."""
        self.settings = settings
        self.weights = b""
        self.results: dict[str, Result] = {}
        self.wrong_reads: list[str] = []
        self.num_preemptions = 0
        self.drafter = right_drafts
        self._name = next(_NAMES)
        self._chains: dict[str, TokenChain] = {}
        self._contents: dict[str, Content] = {}
        self._drafts: dict[str, list[int]] = {}
        self._batches: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        config, cache, block, hash_block = make_configs(settings, socket)
        sockets = [socket, *further_sockets]
        assert len(sockets) == settings.num_parts
        self._hasher = get_request_block_hasher(hash_block, sha256_cbor)
        scheduler_class = AsyncScheduler if settings.is_async else Scheduler
        with model_runner(settings.runner):
            self.scheduler = scheduler_class(
                config, cache, StructuredOutputManager(config), block, hash_block, log_stats=True
            )
            self._num_batches = max(config.max_concurrent_batches, 1 + settings.max_late_outputs)
        self.published: list[KVCacheEvent] = []
        self.scheduler.kv_event_publisher.publish = lambda batch: self.published.extend(batch.events)
        # The tiny model accepts no media.
        self.scheduler.max_num_encoder_input_tokens = _MAX_MEDIA_TOKENS
        self.scheduler.encoder_cache_manager = EncoderCacheManager(_MAX_MEDIA_TOKENS)
        self._handed_out: list[int] = []
        self._watch_blocks()
        self.links: list[PartLink] = []
        self.clock = StepClock()
        self.waits = PartWaits(self.scheduler.connector._scheduler, self.links, self.clock, self._report)
        if further_sockets:
            self._join_parts(config)
        self._make_ranks(config, sockets)
        handshakes = {rank.place: carried(rank.handshake) for rank in self.ranks}
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(handshakes)
        self._outputs = KVOutputAggregator.from_connector(self.worker, len(self.ranks))

    def _join_parts(self, config: Any) -> None:
        """Let time pass in steps only, and watch how long requests wait for parts."""
        side = self.scheduler.connector._scheduler
        self.links += [PartLink(self._report) for _ in range(self.settings.num_parts)]
        for owner in side, side._waits, side._times:
            owner._clock = self.clock
        for owner in side, side._waits:
            owner._tracer = self.waits

    def _make_ranks(self, config: Any, sockets: Sequence[str]) -> None:
        settings = self.settings
        stages, ranks = range(settings.pipeline_parallel), range(settings.tensor_parallel)
        places = list(itertools.product(stages, ranks))
        configs = (
            [part_config(config, sockets, part) for part in range(len(sockets))] if self.links else [config]
        )
        parts = [number * len(sockets) // len(places) for number in range(len(places))]
        self.ranks = [
            SimRank(configs[part], settings, place, self._report, part)
            for part, place in zip(parts, places, strict=True)
        ]

    @property
    def worker(self) -> LMCacheClusterConnector:
        """The worker side of the first rank."""
        return self.ranks[0].worker

    def close(self) -> None:
        self.scheduler.shutdown()
        for rank in self.ranks:
            rank.close()

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
        """Add a request. Returns its name.

        ``fields`` are further fields of vLLM's request, and ``content`` is their meaning to the model. An
        existing ``name`` continues a session.
        """
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
        """Abort the request, as when the client disconnects."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def pause(self) -> None:
        """Pause the engine as ``POST /pause?mode=keep`` does. Step until it has no work, before a reset."""
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)

    def reset(self, new_weights: bytes, max_steps: int = 100_000) -> bool:
        """Pause the engine, reset the caches, change the weights and resume, as for a weight update.

        Returns False if a load still runs after ``max_steps`` steps, or if vLLM 0.29 refuses.
        """
        self.pause()
        for _ in range(max_steps):
            if not (self.scheduler.has_requests() or self._batches):
                break
            self.step()
        try:
            if self.scheduler.has_requests() or self._batches:
                return False
            assert self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        except RuntimeError:
            if hasattr(KVConnectorBase_V1, "bind_kv_cache_manager"):
                raise
            return False
        finally:
            self.scheduler.set_pause_state(PauseState.UNPAUSED)
        self.weights = new_weights
        return True

    def forget(self, *, also_of_running: bool = False) -> None:
        """Empty the engine's own prefix cache, so that only the connector can provide KV."""
        while also_of_running and self._batches:  # vLLM pauses first
            self._update(*self._batches.popleft())
        assert self.scheduler.reset_prefix_cache(reset_running_requests=also_of_running)

    def run(self, *names: str, timeout: float = 60.0) -> None:
        """Step until these requests have ended. Without names, until no work is left and no block is held."""
        deadline = time.monotonic() + timeout
        while (
            any(self.results[name].finish_reason is None for name in names)
            if names
            else self.scheduler.has_requests() or self._batches
        ):
            if time.monotonic() > deadline:
                raise AssertionError(f"requests do not end: {list(self.scheduler.requests.values())}")
            self.step()
        for rank in self.ranks:
            rank.synchronize()

    def serve(self, tokens: Sequence[int], **fields: Any) -> str:
        """Run one request alone, then empty the engine's own cache. Returns the request's name."""
        name = self.add(tokens, **fields)
        self.run(name)
        self.run()
        self.forget()
        return name

    def leftovers(self) -> dict[str, object]:
        """State that the connector holds for requests. Empty after all requests and stores have ended."""
        scheduler = self.scheduler.connector._scheduler
        known = {
            "states": scheduler._states,
            "jobs": scheduler._stores._jobs,
            "computing": scheduler._computing._states,
            "loads": scheduler._open_loads.loads,
        }
        for rank in self.ranks:
            worker = rank.worker._worker
            for name in ("held", "stores", "loading"):
                known[f"{name} by {rank.place}"] = getattr(worker, f"_{name}")
        known |= {f"unreported in part {part}": link.open for part, link in enumerate(self.links)}
        speakers = [worker._speaker for rank in self.ranks if (worker := rank.worker._worker)._speaker]
        known |= {f"hinted to speaker {number}": each._hinted for number, each in enumerate(speakers)}
        return {name: dict.fromkeys(values) for name, values in known.items() if values}

    def step(self) -> bool:
        """Run one step of the engine's loop. Returns whether something was computed."""
        if not self.scheduler.has_requests() and not self._batches:
            return False
        num_scheduled = 0
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            num_scheduled = output.total_num_scheduled_tokens
            self._batches.append((output, self._execute(output)))
            if len(self._batches) < self._num_batches and num_scheduled:
                return True
        self._update(*self._batches.popleft())
        if not num_scheduled:
            time.sleep(0.0005)  # real time: EngineCore's own idle step
        return bool(num_scheduled)

    # ---- the scheduler side ----

    def _update(self, output: SchedulerOutput, ran: ModelRunnerOutput) -> None:
        self.clock.num_outputs += 1
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

    def _watch_blocks(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        allocate = pool.get_new_blocks

        def get_and_record(num_blocks: int) -> list[KVCacheBlock]:
            blocks = allocate(num_blocks)
            self._handed_out += [block.block_id for block in blocks]
            return blocks

        pool.get_new_blocks = get_and_record

    def _worthless_blocks(self) -> list[int]:
        """Free blocks whose content no copy may read.

        With one group of full attention, blocks are freed after all copies that read them. Blocks of other
        groups slide out under copies, and count when they are allocated again.
        """
        if not self.settings.has_one_full_group:
            return []
        pool = self.scheduler.kv_cache_manager.block_pool
        return [block.block_id for block in pool.blocks if not block.ref_cnt and block.block_hash is None]

    # ---- the model, once for all ranks ----

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.num_preemptions += len(output.preempted_req_ids or ())
        handed_out, self._handed_out = self._handed_out, []
        step = Step(output, [], {}, handed_out, self._worthless_blocks())
        self.clock.now += STEP_SECONDS if output.total_num_scheduled_tokens else IDLE_SECONDS
        if output.total_num_scheduled_tokens:
            self._compute(step)
        outputs = [
            self.links[rank.part].execute(rank, step) if self.links else rank.execute(step)
            for rank in self.ranks
        ]
        if len(outputs) == 1:
            return outputs[0]
        return self._outputs.aggregate(
            list(map(copy.copy, outputs))
        )  # copies, because aggregate changes one output, which may be a constant

    def _report(self, description: str) -> None:
        self.wrong_reads.append(description)

    def _compute(self, step: Step) -> None:
        """Add the step's computations, samples and drafts."""
        output = step.output
        for name in output.finished_req_ids:
            self._chains.pop(name, None)
            self._drafts.pop(name, None)
        self._begin_requests(output)
        for name, num_tokens in output.num_scheduled_tokens.items():
            tables = self.scheduler.kv_cache_manager.get_block_ids(name)
            start, chain = self._chains[name].num_computed, self._chains[name]
            drafts = output.scheduled_spec_decode_tokens.get(name, [])
            if drafts and drafts[0] < 0:
                # Placeholders: the runner may have drafts. Missing drafts become 0, which is never right.
                drafts = (self._drafts.get(name, []) + [0] * len(drafts))[: len(drafts)]
            end = start + num_tokens
            step.computations.append(Computation(name, tables, start, end, chain.cells(drafts)))
            step.sampled[name] = self._sample(name, end, drafts)

    def _begin_requests(self, output: SchedulerOutput) -> None:
        """Add new and resumed requests in the form of either runner. Check the position of other requests."""
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

    def _sample(self, name: str, end: int, drafts: list[int]) -> list[int]:
        chain = self._chains[name]
        is_sampling = end - len(drafts) >= len(chain.tokens)
        chain.num_computed = end - len(drafts)
        if not is_sampling:
            return []
        sampled = chain.continuation(drafts)
        chain.num_computed += len(sampled) - 1
        chain.tokens += sampled
        if self.settings.num_drafts:
            self._drafts[name] = self.drafter(chain, self.settings.num_drafts)
        return sampled


def _prompt(new: NewRequestData) -> list[int]:
    """Tokens of the prompt. A prompt of embeddings only has placeholders."""
    return new.prompt_token_ids if new.prompt_token_ids is not None else [0] * len(new.prompt_embeds)


def right_drafts(chain: TokenChain, num_drafts: int) -> list[int]:
    """The tokens that will be sampled: every draft is accepted."""
    ahead = TokenChain(chain.tokens, chain.weights, chain.content)
    while len(ahead.tokens) < len(chain.tokens) + num_drafts:
        ahead.tokens += ahead.continuation()
    return ahead.tokens[len(chain.tokens) :]
