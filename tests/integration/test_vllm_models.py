"""Real engines with a model for each kind of KV: loaded KV equals computed KV.

One engine is started per model: gpt-oss and Gemma 3 (full and window groups), Mistral (windows only),
Llama 4 (chunked attention), DeepSeek (latents), Qwen3-Next (states of linear attention).
"""

from dataclasses import dataclass
from typing import Any

import pytest

from testing.engine import tiny_kinds
from testing.engine.process import EngineProcess, patient_config
from testing.engine.tiny_kinds import TinyKind
from testing.processes import RedisProcess, SidecarProcess
from tests.harness.client import real_engine
from tests.harness.client.real_engine import attached_engine, restart_with_empty_arena, wait_hit

pytestmark = [pytest.mark.vllm, pytest.mark.redis]


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

    @property
    def attached_tokens(self) -> int:
        """Tokens of the shortest prompt that hits."""
        return self.chunk_tokens + 10

    @property
    def options(self) -> dict[str, Any]:
        """Options of ``EngineProcess``."""
        return {"model": str(self.kind.path), "enable_prefix_caching": True, **self.kind.engine_args}

    def make_prompt(self, num_chunks: int = 3, seed: object = 0) -> list[int]:
        """A prompt that ends a few tokens behind a chunk, so that windows hold loaded KV to the end."""
        return real_engine.make_prompt(num_chunks * self.chunk_tokens + 10, seed)


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


@pytest.fixture(scope="module", params=CASES.values(), ids=list(CASES))
def served(request, tmp_path_factory):
    case, folder = request.param, tmp_path_factory.mktemp("engine")
    with RedisProcess() as redis:
        tier = {"remote_url": redis.unix_url, "remote_timeout_seconds": 60}
        if case.lower_tier == "disk":
            tier = {"disk_path": folder, "disk_size": "1Gi"}
        with SidecarProcess(memory_size="128Mi", **tier) as sidecar:
            config = patient_config(sidecar.socket_path, chunk_tokens=case.chunk_tokens)
            options = {"num_tokens": case.attached_tokens, **case.options}
            with attached_engine(sidecar, folder, config, **options) as engine:
                yield Served(case, engine, sidecar)


def assert_loaded(served, hit, stored, num_loaded):
    """Check that every loaded block that the engine still holds equals the stored block, byte for byte."""
    assert hit.num_cached_tokens == num_loaded
    num_compared = 0
    layers = zip(served.engine.block_tokens(), hit.kv, stored.kv, strict=True)
    for layer, (block_tokens, *both) in enumerate(layers):
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


def test_rows_are_loaded_after_a_restart_and_after_loss_of_the_arena(served):
    prompt = served.case.make_prompt(seed="restarted")
    (computed,) = served.engine.generate(prompt)
    served.sidecar.wait_until(lambda stats: stats["num_unwritten_rows"] == 0)
    for restart in (restart_with_arena, restart_with_empty_arena):
        restart(served.engine, served.sidecar, served.case.attached_tokens)
        served.engine.scrub_kv()
        (hit,) = served.engine.generate(prompt)
        assert_loaded(served, hit, computed, served.case.full_hit)
    assert served.sidecar.stats()[served.case.lower_tier]["promoted"] > 0


def restart_with_arena(engine: EngineProcess, sidecar: SidecarProcess, num_tokens: int) -> None:
    sidecar.restart()
    wait_hit(engine, sidecar, num_tokens)
