"""vLLM's GPU runner (V2) with FlashAttention's layout on an emulated GPU: the step ``vllm`` of gpu-check.

The KV lies in memory of the simulated driver, so connector and sidecar copy as on a GPU. The step compares
bytes of KV, tokens and logprobs after each hit, with both copiers and after restarts of the engine.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace
from unittest import mock

import pytest

from benchmarks.gpu.engine.blend import are_equal
from benchmarks.gpu.engine.hits import Hits, Reference
from benchmarks.gpu.engine.sizes import choose
from benchmarks.gpu.engine.world import World
from benchmarks.gpu.results import Results, problems, read
from benchmarks.gpu.scale import TINY, Scale
from testing import cuda
from testing.child_process import REPOSITORY, SOURCES
from testing.engine.process import EngineFailed, Generated

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SIMULATED = not os.environ.get("LMCACHE_TEST_GPU")
RESTARTS = 3


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Run the step. Returns its rows, by the title of their table."""
    folder = tmp_path_factory.mktemp("step")
    with cuda.node() as node:
        if not SIMULATED:
            pytest.skip("the driver is not simulated")
        path = os.pathsep.join(filter(None, [SOURCES, os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu.run_step", "vllm", str(folder), "500", "--tiny"],
            cwd=REPOSITORY,
            env=os.environ | node.environment() | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert node.processes() == [], "engines or readers outlived the step"
    assert done.returncode == 0, done.stdout[-8000:]
    assert problems(read(folder, "vllm")) == []
    by_title = {}
    for line in (folder / "vllm.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if "row" in entry:
            by_title.setdefault(entry["of"], []).append(entry["row"])
    return by_title


def test_engine_is_the_gpu_runner_with_the_layout_of_flash_attention(rows):
    facts = dict(map(tuple, rows["vLLM and its sidecar"]))
    version = metadata.version("vllm").removesuffix("+cpu")
    assert facts["vLLM"].startswith(f"{version},")
    assert facts["vLLM"].endswith("NonNvmlCudaPlatform")
    assert facts["model runner"] == "vllm.v1.worker.gpu.model_runner"
    assert facts["KV of a layer"].startswith("shape [512, 2, 16, 128]"), (
        "blocks, heads, tokens, key and value"
    )
    assert facts["KV of a layer"].endswith("4 layers in 1 allocations")
    assert not [fact for fact in facts if fact.startswith("attempt")]


def test_kv_and_answers_are_right_with_both_copiers_and_after_restarts(rows):
    hits = [
        row for row in rows["Time to the first token"] if row[1] not in ("nothing: cold", "vLLM's own cache")
    ]
    assert all(row[8] == str(int(row[2]) - 1) and row[9:11] == ["same", "same"] for row in hits)
    copies = [
        (fact, value.partition(":")[0]) for fact, value in rows["vLLM and its sidecar"] if "copies" in fact
    ]
    for engine, copier in (("B", "CudaIPC"), ("E", "SharedMemory")):
        restarted = [row for row in hits if row[:2] == [engine, "memory, after a restart of the engine"]]
        assert len({row[2] for row in restarted}) * RESTARTS == len(restarted) > 0
        assert {value for fact, value in copies if fact == f"engine {engine}: copies"} == {copier}
    assert {row[1] for row in hits} >= {"memory", "another pod's memory", "Redis"}


def test_prompts_are_blended_in_slices_while_a_request_decodes(rows):
    full, attended = rows["Blended prompts"]
    assert (full[:4], full[6:]) == (["all", "533", "0", "496"], ["100%", "0.00", "same"])
    num_reused, num_recomputed = map(int, attended[2:4])
    assert num_reused + num_recomputed == 496
    assert 0 <= num_recomputed - 74 <= 8, "15 % of the tokens, and those among the first 16 of the prompt"
    assert attended[6] != "100%"
    assert attended[8] == "same"


class FailingEngine:
    """An engine that starts with Triton's attention only."""

    def __init__(self, log, connector, environment, *, attention_backend, **arguments):
        self.backend, self.environment = attention_backend, environment
        self.generate = mock.Mock()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait_ready(self, timeout):
        if self.backend == "FLASH_ATTN":
            raise EngineFailed("the engine ended\nRuntimeError: no kernel image is available")

    def describe(self):
        return {"vLLM": "0.33.0"}


def test_other_attention_is_tried_and_each_attempt_is_reported(tmp_path):
    world = World(Results(tmp_path, "vllm"), replace(TINY, is_tiny=False), choose(TINY, 0, 0))
    world.model = tmp_path
    with mock.patch("benchmarks.gpu.engine.world.EngineProcess", FailingEngine):
        for name in ("A", "B"):
            with world.engine(name, None) as engine:
                assert isinstance(engine, FailingEngine)
                assert engine.backend == "TRITON_ATTN"
                assert "VLLM_USE_V2_MODEL_RUNNER" not in engine.environment
    entries = [json.loads(line) for line in (tmp_path / "vllm.jsonl").read_text().splitlines()]
    assert [entry["row"] for entry in entries if "row" in entry] == [
        ["attempt with FLASH_ATTN, runner V2", "RuntimeError: no kernel image is available"],
        ["vLLM", "0.33.0"],
    ]


@pytest.mark.parametrize(
    ("gpu_gib", "shared_gib", "layers"), [(80, 64, 32), (80, 24, 16), (24, 64, 16), (40, 32, 32)]
)
def test_model_is_the_largest_that_gpu_and_host_can_hold(gpu_gib, shared_gib, layers):
    sizes = choose(Scale(), gpu_gib << 30, shared_gib << 30)
    assert sizes.shape.layers == layers
    assert sum(sizes.prompts) * sizes.shape.token_bytes < sizes.kv_bytes, "all prompts stay in vLLM's cache"
    in_decoding = (sizes.rounds * sizes.stored_prompts + sizes.restarts + 1) * sizes.prompts[0]
    assert (sum(sizes.prompts) + in_decoding) * sizes.shape.token_bytes < sizes.memory_bytes
    assert (sum(sizes.prompts) + 2 * sizes.prompts[0]) * sizes.shape.token_bytes < sizes.other_memory_bytes


GENERATED = Generated([1], [0.0], 0.1, 0.1, 32, 32, "length", None, [["a", "b", "of the answer"]])


@pytest.mark.parametrize(
    ("hit", "num_loaded", "what"),
    [
        (GENERATED, 32, ""),
        (GENERATED._replace(kv=[["a", "other", "of the answer"]]), 32, "bytes of KV differ"),
        (GENERATED._replace(tokens=[2]), 32, "tokens or logprobs differ"),
        (GENERATED._replace(logprobs=[0.1]), 32, "tokens or logprobs differ"),
        (GENERATED._replace(num_used_cached_tokens=16), 32, "16 tokens were a hit"),
        (GENERATED, 0, "0 were copied"),
    ],
)
def test_difference_fails_the_step(tmp_path, hit, num_loaded, what):
    results = Results(tmp_path, "vllm")
    hits = Hits(SimpleNamespace(results=results, sizes=SimpleNamespace(shape=TINY.shape), has_bars=True))
    engine = mock.Mock()
    engine.generate.return_value = [hit]
    engine.phases.return_value = {"load": [0.001]}
    engine.loaded_tokens.side_effect = [[("kind", 0)], [("kind", num_loaded)]]
    hits.measure(engine, "A", "memory", [Reference([0] * 33, GENERATED, GENERATED, True)], has_bar=True)
    assert results.num_problems == bool(what)
    assert [what in problem.what for problem in problems(read(tmp_path, "vllm"))] == [True] * bool(what)


@pytest.mark.parametrize(
    ("tokens", "logprobs", "expected"),
    [
        ([1, 2, 3], [-5.0, -6.0, -5.0], True),
        ([1, 2, 3], [-5.0, -6.008, -5.0], True),  # a step of bfloat16
        ([1, 4, 5], [-5.0, -6.008, -9.0], True),  # two tokens were nearly as likely: the rest follows
        ([1, 2, 3], [-5.0, -6.0, -5.2], False),
        ([1, 4, 5], [-5.0, -6.2, -9.0], False),
    ],
)
def test_answers_are_equal_up_to_rounding(tokens, logprobs, expected):
    answer = GENERATED._replace(tokens=[1, 2, 3], logprobs=[-5.0, -6.0, -5.0])
    assert are_equal(GENERATED._replace(tokens=tokens, logprobs=logprobs), answer) == expected
