"""The engine of ``blend_vllm``: it counts processor time, and compares log-probabilities with a full prefill.

It runs in a child process, so that its processor time is the engine's alone: that of vLLM and the connector,
on all their threads.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from testing.engine import child
from testing.engine.process import EngineProcess


class Prefill(NamedTuple):
    """One prompt up to its first token."""

    cpu_seconds: float
    seconds: float
    num_cached_tokens: int
    blended: dict[str, int] | None
    """Tokens that were reused and recomputed, as the answer says."""


class Gap(NamedTuple):
    """A request that decodes while a prompt arrives, in processor seconds."""

    longest: float
    usual: float
    """Median time between two tokens before the prompt arrives."""
    prefill: float
    """Time from the prompt's arrival to its first token."""


class BlendEngine(EngineProcess):
    """An engine that measures prompts."""

    child = "-m", "benchmarks.blend_engine"

    def prefill(self, request: dict[str, Any], question_tokens: int = 0, name: str = "") -> Prefill:
        """Run a request to its first token. Under ``name``, remember the log-probabilities after the last
        ``question_tokens`` of its prompt.
        """
        arguments = {"request": request, "question_tokens": question_tokens, "name": name}
        return Prefill(*self._call("prefill", **arguments))

    def compare(self, full: str, name: str) -> tuple[float, float]:
        """Return KL(full || other) in nats, and how often the likeliest next token is the same: means over
        the question's tokens.
        """
        divergence, agreement = self._call("compare", full=full, name=name)
        return divergence, agreement

    def scores(self, name: str, tokens: Sequence[int]) -> list[float]:
        """Return the log-probabilities of these tokens after the prompt that is remembered as ``name``."""
        scores: list[float] = self._call("scores", name=name, tokens=list(tokens))
        return scores

    def gap(self, decoding: dict[str, Any], arriving: dict[str, Any]) -> Gap:
        """Let a request decode while another one arrives."""
        return Gap(*self._call("gap", decoding=decoding, arriving=arriving))

    def cpu_seconds(self) -> float:
        """Return the processor time of this process so far."""
        return float(self._call("cpu_seconds"))


class Child(child.Child):
    """Runs the commands. Every public method is a command."""

    def __init__(self, engine_args: dict[str, Any]) -> None:
        super().__init__(engine_args)
        self._model = self._core.model_executor.driver_worker.worker.model_runner.model
        self._model.register_forward_hook(self._take, with_kwargs=True)
        self._end_passes()
        self._question = range(0)
        self._hidden: dict[int, torch.Tensor] = {}
        self._logprobs: dict[str, torch.Tensor] = {}
        self.stop_hashing_kv()

    def prefill(self, request: dict[str, Any], question_tokens: int, name: str) -> list[Any]:
        """See ``BlendEngine.prefill``."""
        num_tokens = len(request["prompt"])
        self._question, self._hidden = range(num_tokens - question_tokens, num_tokens), {}
        result: dict[str, Any] = {}
        began, cpu_began = time.perf_counter(), time.process_time()
        self._add(self._new_id(), request | {"max_tokens": 1}, result)
        while "tokens" not in result:
            for output in self._engine.step():
                self._note(result, output, began)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        self._drain()
        if name:
            hidden = torch.stack([self._hidden[position] for position in self._question])
            self._logprobs[name] = self._model.compute_logits(hidden).float().log_softmax(-1)
        parameters = (result["kv_transfer_params"] or {}).get("lmcache", {})
        return [cpu_seconds, seconds, result["num_cached_tokens"], parameters.get("blended")]

    def compare(self, full: str, name: str) -> list[float]:
        """See ``BlendEngine.compare``."""
        expected, other = self._logprobs[full], self._logprobs[name]
        divergence = (expected.exp() * (expected - other)).sum(-1).mean()
        return [float(divergence), float((expected.argmax(-1) == other.argmax(-1)).float().mean())]

    def scores(self, name: str, tokens: list[int]) -> list[float]:
        """See ``BlendEngine.scores``."""
        scores: list[float] = self._logprobs[name][-1, tokens].tolist()
        return scores

    def gap(self, decoding: dict[str, Any], arriving: dict[str, Any], num_before: int = 8) -> list[float]:
        """See ``BlendEngine.gap``."""
        decoder, other = self._new_id(), self._new_id()
        self._add(decoder, decoding | {"max_tokens": 4000}, {})
        gaps: list[float] = []
        last = arrived = prefill = 0.0
        while not prefill:
            for output in self._engine.step():
                now = time.process_time()
                if output.request_id == decoder:
                    gaps.append(now - last)
                    last = now
                else:
                    prefill = now - arrived
            if not arrived and len(gaps) > num_before:
                arrived = time.process_time()
                self._add(other, arriving | {"max_tokens": 1}, {})
        self._engine.abort_request([decoder])
        self._drain()
        return [max(gaps[num_before:]), statistics.median(gaps[1:num_before]), prefill]

    def cpu_seconds(self) -> float:
        """See ``BlendEngine.cpu_seconds``."""
        return time.process_time()

    def _end_passes(self) -> None:
        """Let passes compute all layers while the question's hidden states are remembered."""
        from lmcache_client.vllm.blend.passes import Passes

        run = Passes.run

        def run_to_end(passes: Passes, *args: Any, stop_before: str = "", **options: Any) -> None:
            is_last = stop_before == list(passes._layers)[-1]
            run(passes, *args, stop_before="" if self._question and is_last else stop_before, **options)

        Passes.run = run_to_end  # type: ignore[assignment, method-assign]

    def _new_id(self) -> str:
        self._next_id += 1
        return str(self._next_id - 1)

    def _take(self, module: Any, args: Any, kwargs: dict[str, Any], hidden: torch.Tensor) -> None:
        """Remember the hidden states of the question. The last pass that computes a token counts."""
        if not self._question:
            return
        positions = kwargs["positions"] if "positions" in kwargs else args[1]
        for position, row in zip(positions.tolist(), itertools.count()):
            if position in self._question:
                self._hidden[position] = hidden[row].clone()


if __name__ == "__main__":
    child.main(Child)
