"""The engine of ``blend_isolation``: it compares the KV of prompts with KV that was computed before.

KV of full blocks is compared by numbers, just before a request's blocks are freed.
"""

from __future__ import annotations

from typing import Any

import torch

from testing.engine import child
from testing.engine.kv_digests import layers
from testing.engine.process import EngineProcess


class IsolationEngine(EngineProcess):
    """An engine that knows the exact KV of prompts."""

    child = "-m", "benchmarks.isolation_engine"

    def remember(self, prompts: list[list[int]], salt: str) -> None:
        """Compute these prompts under a salt that nothing else uses, and remember their KV."""
        self._call("remember", prompts=prompts, salt=salt)

    def differences(self) -> dict[str, list[float]]:
        """Return the largest difference from the remembered KV, by request and block, of all requests that
        ended since the last call.
        """
        differences: dict[str, list[float]] = self._call("differences")
        return differences


class Child(child.Child):
    """Runs the commands. Every public method is a command."""

    def __init__(self, engine_args: dict[str, Any]) -> None:
        super().__init__(engine_args)
        self.stop_hashing_kv()
        self._remembered: dict[tuple[int, ...], torch.Tensor] = {}
        self._remembers = False
        self._differences: dict[str, list[float]] = {}
        scheduler = self._core.scheduler
        finished = scheduler._connector_finished

        def compare_and_finish(request: Any) -> Any:
            self._compare(request)
            return finished(request)

        scheduler._connector_finished = compare_and_finish

    def remember(self, prompts: list[list[int]], salt: str) -> None:
        """See ``IsolationEngine.remember``."""
        self._remembers = True
        for prompt in prompts:
            self.generate([{"prompt": prompt, "max_tokens": 1, "cache_salt": salt}])
        self._remembers = False

    def differences(self) -> dict[str, list[float]]:
        """See ``IsolationEngine.differences``."""
        differences, self._differences = self._differences, {}
        return differences

    def _compare(self, request: Any) -> None:
        prompt, kv = tuple(request.prompt_token_ids), self._kv_of(request)
        if self._remembers:
            self._remembered[prompt] = kv
        elif (expected := self._remembered.get(prompt)) is not None:
            largest = (kv - expected[: len(kv)]).abs().flatten(1).amax(1)
            self._differences[request.request_id.split("-")[0]] = largest.tolist()

    def _kv_of(self, request: Any) -> torch.Tensor:
        """Return the KV of the prompt's full blocks: shape [blocks, values of all layers]."""
        scheduler = self._core.scheduler
        tables = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        ((group, num_tokens), *_) = layers(scheduler)
        num_computed = min(request.num_computed_tokens, request.num_prompt_tokens)
        blocks = torch.tensor(tables[group][: num_computed // num_tokens], dtype=torch.int64)
        caches = self._core.model_executor.driver_worker.worker.model_runner.kv_caches
        return torch.cat([kv[blocks].flatten(1) for kv in caches], dim=1)


if __name__ == "__main__":
    child.main(Child)
