"""The child of ``process.EngineProcess``: one vLLM engine that runs commands, JSON lines on two inherited
pipes.

Each line is ``{"do": name, ...}``. Its answer is one line, ``{"error": text}`` if the command failed.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any

import torch

from testing import cuda
from testing.engine import gates, gpu, kv_digests, kv_files, namespaces, simulated_gpu
from testing.engine.environment import PROCESS

_SCRUBBED = 0x5A
"""KV bytes that no kernel writes: a load that copies nothing must not leave the right bytes by chance."""

_PHASES = "arrival", "idle", "computing", "load"


class Child:
    """Runs the commands. Every public method is a command."""

    def __init__(self, engine_args: dict[str, Any]) -> None:
        from vllm import LLM

        with simulated_gpu.kv_in_device_memory():
            self._engine = LLM(**engine_args).llm_engine
        self._core = self._engine.engine_core.engine_core
        self._next_id = 0
        self._kv: dict[str, list[list[str]]] = {}
        self._hashes_kv = True
        self._kv_folder: str | None = None
        self._num_preemptions = 0
        self._loaded_blocks: list[int] | None = None
        self._phases: dict[str, list[float]] = {phase: [] for phase in _PHASES}
        self._steps: list[tuple[float, int]] = []
        kv_digests.watch(self._core, self._kv.__setitem__, lambda: self._hashes_kv)
        kv_files.watch(self._core, lambda: self._kv_folder)
        self._count_preemptions()
        self._recomputed_from: dict[str, int] = {}
        self._note_recomputed()
        self._num_step_tokens = 0
        self._note_steps()

    def generate(
        self, requests: list[dict[str, Any]], reset_after: int = 0, pauses: bool = False
    ) -> list[dict[str, Any]]:
        """Run requests ``{prompt: [token ids], max_tokens, cache_salt?, prompt_logprobs?, regex?,
        trace_headers?, kv_transfer_params?, first_step?, num_steps?}`` concurrently to their end.

        ``regex`` is a grammar for the answer. A request arrives before the step ``first_step``, by default
        before the first one. It is aborted ``num_steps`` steps later, if it still runs. After ``reset_after``
        steps, if any, all caches are reset while the requests run. If the engine ``pauses`` for the reset,
        it first ends loads and computes nothing.
        """
        results: dict[str, dict[str, Any]] = {str(self._next_id + n): {} for n in range(len(requests))}
        self._next_id += len(requests)
        waiting = sorted(zip(results, requests, strict=True), key=lambda each: each[1].get("first_step", 1))
        self._phases = {phase: [] for phase in _PHASES}
        self._steps = []
        started = time.perf_counter()
        for step in itertools.count(1):
            while waiting and waiting[0][1].get("first_step", 1) <= step:
                request_id, request = waiting.pop(0)
                self._add(request_id, request, results[request_id])
            self._abort(results, requests, step)
            if not self._engine.has_unfinished_requests() and not waiting:
                break
            if reset_after and step >= reset_after and self._reset(pauses):
                reset_after = 0
            step_began_at = time.perf_counter()
            outputs = self._engine.step()
            seconds = time.perf_counter() - step_began_at
            self._phases["computing" if self._num_step_tokens else "idle"].append(seconds)
            self._steps.append((seconds, self._num_step_tokens))
            for output in outputs:
                self._note(results[output.request_id], output, started)
        if reset_after:
            raise RuntimeError("the engine could not be reset while requests ran")
        self._drain()
        for request_id in results:
            recomputed_from = [
                self._recomputed_from.pop(key)
                for key in list(self._recomputed_from)
                if key.split("-")[0] == request_id
            ]
            used = min(recomputed_from, default=results[request_id]["num_cached_tokens"])
            results[request_id]["num_used_cached_tokens"] = used
            results[request_id]["kv"] = next(
                self._kv.pop(key) for key in list(self._kv) if key.split("-")[0] == request_id
            )
        return list(results.values())

    def steps(self) -> list[tuple[float, int]]:
        """Seconds and number of scheduled tokens of each step of the last ``generate``."""
        return self._steps

    def block_tokens(self) -> list[int]:
        """Tokens in a block of each layer, in the order of the model."""
        return [tokens for _, tokens in kv_digests.layers(self._core.scheduler)]

    def loaded_tokens(self) -> list[tuple[str, int]]:
        """For each KV group: its kind in vLLM, and the number of tokens loaded since the first call."""
        groups = [group.kv_cache_spec for group in self._core.scheduler.kv_cache_config.kv_cache_groups]
        if self._loaded_blocks is None:
            self._loaded_blocks = [0] * len(groups)
            self._count_loads(self._loaded_blocks)
        return [
            (type(spec).__name__, blocks * spec.block_size)
            for spec, blocks in zip(groups, self._loaded_blocks, strict=True)
        ]

    def describe(self) -> dict[str, str]:
        """Return versions, and how this engine computes."""
        import vllm
        from vllm.platforms import current_platform

        (kv,) = self._on_workers(_describe_kv)[:1]
        worker = self._core.model_executor.driver_worker.worker
        return {
            "vLLM": f"{vllm.__version__}, torch {torch.__version__}, {type(current_platform).__name__}",
            "model runner": type(worker.model_runner).__module__,
            "KV of a layer": kv,
        }

    def num_preemptions(self) -> int:
        """Number of preemptions so far."""
        return self._num_preemptions

    def save_kv(self, folder: str | None) -> None:
        """Save the KV of each request that finishes in this folder (``kv_files``), or in none."""
        self._kv_folder = folder

    def stop_hashing_kv(self) -> None:
        """For benchmarks: with one answer token, hashing would be part of the time to first token."""
        self._hashes_kv = False

    def start_hashing_kv(self) -> None:
        """Undo ``stop_hashing_kv``."""
        self._hashes_kv = True

    def scrub_kv(self) -> None:
        """Overwrite all KV blocks, and empty the engine's own prefix cache."""
        self._drain()
        assert self._core.scheduler.reset_prefix_cache()
        self._on_workers(_scrub)

    def reset_caches(self) -> bool:
        """Reset all caches, as an engine does when it is paused, put to sleep or given other weights."""
        self._drain()
        return bool(self._core.reset_prefix_cache(reset_running_requests=True, reset_connector=True))

    def phases(self) -> dict[str, list[float]]:
        """Seconds of the phases of the last ``generate`` until its last answer: each "arrival" of a request,
        each step that was "idle" or "computing", and each "load" from the cache.
        """
        return self._phases

    def _add(self, request_id: str, request: dict[str, Any], result: dict[str, Any]) -> None:
        """Let a request arrive."""
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        prompt = {"prompt_token_ids": request["prompt"]}
        if salt := request.get("cache_salt"):
            prompt["cache_salt"] = salt
        regex, transfer = request.get("regex"), request.get("kv_transfer_params")
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request["max_tokens"],
            ignore_eos=True,
            logprobs=0,
            prompt_logprobs=request.get("prompt_logprobs"),
            detokenize=False,
            structured_outputs=StructuredOutputsParams(regex=regex) if regex else None,
            extra_args={"kv_transfer_params": transfer} if transfer else None,
        )
        result["request_id"] = request_id
        result["began_at"] = time.perf_counter()
        self._engine.add_request(request_id, prompt, params, trace_headers=request.get("trace_headers"))
        self._phases["arrival"].append(time.perf_counter() - result["began_at"])

    def _abort(
        self, results: dict[str, dict[str, Any]], requests: Sequence[dict[str, Any]], step: int
    ) -> None:
        """Abort the requests that end before this step."""
        for (request_id, result), request in zip(results.items(), requests, strict=True):
            num_steps = step - request.get("first_step", 1)
            if num_steps == request.get("num_steps") and "tokens" not in result:
                self._engine.abort_request([request_id])
                result |= {"tokens": [], "logprobs": [], "ttft": 0.0, "ended": 0.0, "num_cached_tokens": 0}
                result |= {"finish_reason": "abort", "kv_transfer_params": None}
                result.pop("began_at", None)

    def _reset(self, pauses: bool) -> bool:
        from vllm.v1.core.sched.interface import PauseState

        scheduler = self._core.scheduler
        try:
            if pauses:
                scheduler.set_pause_state(PauseState.PAUSED_ALL)
                while scheduler.has_requests():
                    self._engine.step()
            return bool(self._core.reset_prefix_cache(reset_running_requests=True, reset_connector=True))
        except RuntimeError:  # a request waits for its load, so vLLM refuses for now
            return False
        finally:
            scheduler.set_pause_state(PauseState.UNPAUSED)

    def _note(self, result: dict[str, Any], output: Any, started: float) -> None:
        answer = output.outputs[0]
        if answer.token_ids and "ttft" not in result:
            result["ttft"] = time.perf_counter() - result.pop("began_at")
        if output.finished:
            result["ended"] = time.perf_counter() - started
            result["tokens"] = list(answer.token_ids)
            result["logprobs"] = [
                step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)
            ]
            result["num_cached_tokens"] = output.num_cached_tokens
            result["finish_reason"] = answer.finish_reason
            result["kv_transfer_params"] = output.kv_transfer_params

    def _drain(self) -> None:
        """Step until the connector has released the blocks that it holds."""
        deadline = time.monotonic() + 10
        while self._core.scheduler.has_finished_requests() and time.monotonic() < deadline:
            self._engine.step()

    def _on_workers(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(worker, *args)`` on each rank."""
        results: list[Any] = self._core.model_executor.collective_rpc(function, args=args)
        return results

    def _count_loads(self, num_blocks: list[int]) -> None:
        from lmcache_client.core.copier import CpuCopier, EngineCopier, RowLoad
        from lmcache_client.core.cuda_copier import CudaCopier

        def counting(load: Callable[..., None]) -> Callable[..., None]:
            def count(copier: EngineCopier, rows: Sequence[RowLoad], fence: Any) -> None:
                for row in rows:
                    num_blocks[row.group] += len(row.blocks)
                load(copier, rows, fence)

            return count

        for kind in (CpuCopier, CudaCopier):
            kind.load = counting(kind.load)  # type: ignore[method-assign]

    def _count_preemptions(self) -> None:
        preempt = self._core.scheduler._preempt_request

        def count(*args: Any, **kwargs: Any) -> Any:
            self._num_preemptions += 1
            return preempt(*args, **kwargs)

        self._core.scheduler._preempt_request = count

    def _note_steps(self) -> None:
        from lmcache_client.core.worker import WorkerSide

        schedule, take_figures = self._core.scheduler.schedule, WorkerSide.take_figures

        def schedule_and_note(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._num_step_tokens = output.total_num_scheduled_tokens
            return output

        def take_and_note(side: WorkerSide) -> dict[str, float]:
            figures = take_figures(side)
            if seconds := figures.get("load_seconds"):
                self._phases["load"].append(seconds)
            return figures

        self._core.scheduler.schedule = schedule_and_note
        WorkerSide.take_figures = take_and_note  # type: ignore[assignment,method-assign]

    def _note_recomputed(self) -> None:
        scheduler = self._core.scheduler
        update = scheduler._update_requests_with_invalid_blocks

        def update_and_note(requests: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
            requests = list(requests)
            updated = update(requests, *args, **kwargs)
            for request in requests:
                if request.request_id in updated[0]:
                    self._recomputed_from[request.request_id] = request.num_computed_tokens
            return updated

        scheduler._update_requests_with_invalid_blocks = update_and_note


def _scrub(worker: Any) -> None:
    kv_caches = worker.worker.model_runner.kv_caches
    for kv in kv_caches:
        kv.view(torch.uint8).fill_(_SCRUBBED)
    if kv_caches[0].is_cuda:  # loads run in streams of their own
        torch.cuda.synchronize()


def _describe_kv(worker: Any) -> str:
    kv = worker.worker.model_runner.kv_caches
    storages = len({layer.untyped_storage().data_ptr() for layer in kv})
    first = kv[0]
    return (
        f"shape {list(first.shape)}, strides {list(first.stride())}, {first.dtype}, {first.device};"
        f" {len(kv)} layers in {storages} allocations"
    )


def _serve(child: Child, commands: IO[str], answers: IO[str]) -> None:
    for line in commands:
        command = json.loads(line)
        try:
            answer = {"answer": getattr(child, command.pop("do"))(**command)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main(kind: type[Child] = Child) -> None:
    """``child.py COMMAND_FD ANSWER_FD ENGINE_ARGS_JSON``."""
    if PROCESS in os.environ:
        namespaces.become_process(int(os.environ[PROCESS]))
    cuda.load_driver()
    gpu.prepare()
    gates.hold_copies()
    with open(int(sys.argv[1])) as commands, open(int(sys.argv[2]), "w") as answers:
        child = kind(json.loads(sys.argv[3]))
        answers.write('{"answer": "ready"}\n')
        answers.flush()
        _serve(child, commands, answers)
        # vLLM collects garbage at its end, which takes over a second. The process ends anyway.
        gc.collect = gc.unfreeze = lambda *_: 0  # type: ignore[assignment]
        child._core.shutdown()


if __name__ == "__main__":
    main()
