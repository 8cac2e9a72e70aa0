"""An engine with another connector next to ours: loaded KV equals computed KV."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from testing.child_process import wait_until
from testing.engine.process import EngineProcess, example_config, multi_config, patient_config
from testing.processes import SidecarProcess
from tests.harness.client.real_engine import BLOCK, CHUNK, assert_hit, make_prompt

pytestmark = pytest.mark.vllm

NUM_CHUNKS = 4
NUM_TOKENS = NUM_CHUNKS * CHUNK + 26


@pytest.mark.parametrize("is_first", [True, False], ids=["ours first", "ours last"])
def test_kv_loaded_by_either_connector_equals_computed_kv(
    sidecar: SidecarProcess, tmp_path: Path, is_first: bool
) -> None:
    """The connector in vLLM's MultiConnector, next to the ExampleConnector, which stores KV in files."""
    storage = tmp_path / "example"
    both = [patient_config(sidecar.socket_path), example_config(storage)]
    config = multi_config(*(both if is_first else both[::-1]))
    with EngineProcess(tmp_path / "log", config) as engine:
        wait_stored(engine, sidecar, 1, make_prompt(CHUNK + BLOCK))
        prompt = make_prompt(NUM_TOKENS)
        computed = wait_stored(engine, sidecar, 1 + NUM_CHUNKS, prompt)
        engine.scrub_kv()
        (hit,) = engine.generate(prompt)  # loaded by the first connector of the list that has the chunks
        by_ours, by_example = NUM_CHUNKS * CHUNK, (NUM_TOKENS - 1) // BLOCK * BLOCK
        assert_hit(hit, computed, by_ours if is_first else by_example)
        shutil.rmtree(storage)
        engine.scrub_kv()
        assert_hit(engine.generate(prompt)[0], computed, by_ours)
        sidecar.wait_until(lambda stats: stats["memory"]["leased_rows"] == 0)
    log = (tmp_path / "log").read_text()
    assert "offline" not in log
    assert "LMCache Cluster is OFF" not in log


def wait_stored(engine: EngineProcess, sidecar: SidecarProcess, num_rows: int, prompt: list[int]) -> Any:
    """Run a prompt until the sidecar has this number of rows. Returns the first answer.

    In a MultiConnector the engine's identity follows with the first step.
    """
    (computed,) = engine.generate(prompt)
    assert computed.num_cached_tokens == 0

    def is_stored() -> bool:
        if sidecar.stats()["memory"]["used_rows"] == num_rows:
            return True
        engine.generate(prompt)
        return False

    wait_until(is_stored, what="stored rows")
    sidecar.wait_usable()
    return computed
