"""Real engines with a model for each kind of KV: loaded KV equals computed KV.

One engine is started per model: gpt-oss and Gemma 3 (full and window groups), Mistral (windows only),
Llama 4 (chunked attention), DeepSeek (latents), Qwen3-Next (states of linear attention).
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

from testing.child_process import wait_until
from testing.engine import tiny_kinds
from testing.engine.process import EngineProcess, Generated, connector_config
from testing.engine.tiny_kinds import TinyKind
from testing.processes import RedisProcess, SidecarProcess

pytestmark = [pytest.mark.vllm, pytest.mark.redis]

SALTS = map("salt {}".format, itertools.count())
ANSWER_SECONDS = 30.0
"""Seconds until an engine computes an unanswered request. A busy machine must not turn hits into misses."""


@dataclass(frozen=True)
class Case:
    """A model, and the sizes of its hits."""

    kind: TinyKind
    chunk_tokens: int = 256
    step_tokens: int = 256
    """Hits end on multiples of this number."""
    is_exact: bool = True
    """Whether a hit and a whole prompt are computed by the same kernels."""
    lower_tier: str = "remote"

    @property
    def full_hit(self) -> int:
        """Tokens of ``make_prompt()`` that are loaded."""
        return 3 * self.chunk_tokens + 10 // self.step_tokens * self.step_tokens

    def make_prompt(self, num_chunks: int = 3, seed: object = 0) -> list[int]:
        """A prompt that ends a few tokens behind a chunk, so that windows hold loaded KV to the end."""
        tokens = random.Random(f"{seed}")
        return [tokens.randrange(4, 260) for _ in range(num_chunks * self.chunk_tokens + 10)]


CASES = {
    "gemma3": Case(tiny_kinds.GEMMA3, lower_tier="disk"),
    "mistral": Case(tiny_kinds.MISTRAL),
    "gpt-oss": Case(tiny_kinds.GPT_OSS, lower_tier="disk"),
    "llama4": Case(tiny_kinds.LLAMA4),
    "qwen3-next": Case(tiny_kinds.QWEN3_NEXT, chunk_tokens=640, step_tokens=640),
    "deepseek": Case(tiny_kinds.DEEPSEEK2, step_tokens=32, is_exact=False),
}


@dataclass
class Served:
    """An engine and its sidecar."""

    case: Case
    engine: EngineProcess
    sidecar: SidecarProcess

    def cold(self, *prompts: list[int]) -> list[Generated]:
        """Run without hits: nothing is stored under the new salt, and KV does not depend on the salt."""
        return self.engine.generate(*prompts, cache_salt=next(SALTS))

    def wait_attached(self) -> None:
        self.sidecar.wait_until(lambda stats: any(client["is_attached"] for client in stats["clients"]))
        self.sidecar.wait_until(lambda stats: stats["memory"]["usable_rows"] >= 40)

        def is_hit() -> bool:
            (result,) = self.engine.generate(self.case.make_prompt(1, "attached"))
            self.engine.scrub_kv()
            return result.num_cached_tokens > 0

        wait_until(is_hit)

    def hit(self, prompt: list[int]) -> Generated:
        """Repeat the request until all rows are loaded. A request waits no longer than computing takes."""
        results = []

        def is_full() -> bool:
            self.engine.scrub_kv()
            results.extend(self.engine.generate(prompt))
            return results[-1].num_cached_tokens == self.case.full_hit

        wait_until(is_full)
        return results[-1]

    def restart_with_empty_arena(self) -> None:
        """Empty the memory tier: only the lower tier holds the stored rows."""
        self.sidecar.wait_until(lambda stats: stats["num_unwritten_rows"] == 0)
        self.sidecar.terminate()
        self.sidecar.arena_path.unlink()
        self.sidecar.start()
        self.wait_attached()


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def served(request, tmp_path_factory):
    case, folder = request.param, tmp_path_factory.mktemp("engine")
    with RedisProcess() as redis:
        tier = {"disk_path": folder, "disk_size": "1Gi"} if case.lower_tier == "disk" else {}
        with SidecarProcess(memory_size="256Mi", **tier or {"remote_url": redis.unix_url}) as sidecar:
            connector = connector_config(
                sidecar.socket_path, answer_seconds=ANSWER_SECONDS, chunk_tokens=case.chunk_tokens
            )
            options = {"model": str(case.kind.path), "enable_prefix_caching": True, "max_num_seqs": 4}
            options["is_patient"] = True
            with EngineProcess(folder / "log", connector, **options | case.kind.engine_args) as engine:
                engine.wait_ready()
                served = Served(case, engine, sidecar)
                served.wait_attached()
                yield served


def assert_loaded(served, hit, stored, num_loaded):
    """Check that every loaded block that the engine still holds equals the stored block, byte for byte."""
    assert hit.num_cached_tokens == num_loaded
    num_compared = 0
    layers = itertools.cycle(served.engine.block_tokens())  # repeated for each rank
    for layer, (block_tokens, *both) in enumerate(zip(layers, hit.kv, stored.kv, strict=False)):
        loaded, computed = (blocks[: num_loaded // block_tokens] for blocks in both)
        for index, (loaded_block, computed_block) in enumerate(zip(loaded, computed, strict=True)):
            if loaded_block and computed_block:
                assert loaded_block == computed_block, f"layer {layer} block {index}"
                num_compared += 1
    assert num_compared


def test_loaded_kv_equals_computed_kv(served):
    prompt = served.case.make_prompt()
    (computed,) = served.engine.generate(prompt)
    assert computed.num_cached_tokens == 0
    (local_hit,) = served.engine.generate(prompt)
    served.engine.scrub_kv()
    (hit,) = served.engine.generate(prompt)
    assert_loaded(served, hit, computed, served.case.full_hit)
    reference = computed if served.case.is_exact else local_hit
    assert hit.num_cached_tokens == local_hit.num_cached_tokens or served.case.is_exact
    assert (hit.tokens, hit.logprobs) == (reference.tokens, pytest.approx(reference.logprobs, abs=1e-4))


def test_shared_prefix_hits_with_prefix_caching_enabled(served):
    """The engine's own cache retains only the windows and states that the very same prompt needs."""
    first, second = (served.case.make_prompt(seed="shared")[: served.case.full_hit - 5] for _ in range(2))
    second = first[: 2 * served.case.chunk_tokens + 3] + served.case.make_prompt(1, "own")
    (reference,) = served.cold(second)
    served.engine.scrub_kv()
    served.engine.generate(first)
    (hit,) = served.engine.generate(second)
    assert hit.num_cached_tokens == 2 * served.case.chunk_tokens
    if served.case.is_exact:
        assert hit.tokens == reference.tokens
        assert hit.logprobs == pytest.approx(reference.logprobs, abs=1e-3)


def test_latents_of_two_ranks_are_stored_once(tmp_path):
    case = CASES["deepseek"]
    options = {"model": str(case.kind.path), "tensor_parallel_size": 2, **case.kind.engine_args}
    with SidecarProcess(memory_size="256Mi") as sidecar:
        connector = connector_config(sidecar.socket_path, answer_seconds=ANSWER_SECONDS)
        cores = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
        with EngineProcess(
            tmp_path / "log", connector, cores, enable_prefix_caching=True, **options
        ) as engine:
            served = Served(case, engine.wait_ready(timeout=180), sidecar)
            served.wait_attached()
            assert len(sidecar.stats()["clients"]) == 3
            assert sidecar.stats()["geometry"]["num_columns"] == 1
            prompt = case.make_prompt()
            (computed,) = engine.generate(prompt)
            (local_hit,) = engine.generate(prompt)
            engine.scrub_kv()
            (hit,) = engine.generate(prompt)
            assert_loaded(served, hit, computed, case.full_hit)
            assert hit.tokens == local_hit.tokens


def test_queued_requests_hit_under_load(served):
    prompts = [served.case.make_prompt(2, f"load {number}") for number in range(9)]  # 4 run concurrently
    stored = served.engine.generate(*prompts)
    served.engine.scrub_kv()
    for hit, computed in zip(served.engine.generate(*prompts), stored, strict=True):
        assert_loaded(served, hit, computed, served.case.full_hit - served.case.chunk_tokens)


def test_rows_are_loaded_after_a_restart_and_after_loss_of_the_arena(served):
    prompt = served.case.make_prompt(seed="restarted")
    (computed,) = served.engine.generate(prompt)
    served.sidecar.wait_until(lambda stats: stats["num_unwritten_rows"] == 0)
    for restart in (served.sidecar.restart, served.restart_with_empty_arena):
        restart()
        served.wait_attached()
        assert_loaded(served, served.hit(prompt), computed, served.case.full_hit)
    assert served.sidecar.stats()[served.case.lower_tier]["promoted"] > 0
