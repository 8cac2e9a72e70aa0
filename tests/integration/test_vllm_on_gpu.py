"""A real vLLM whose KV is memory of the simulated GPU, and a real sidecar that reads it over CUDA IPC.

Both run in PID namespaces of their own, as two containers do, so that their process ids are equal numbers
again and again. Engines and the sidecar's reader are frozen and killed in mid-copy, and started again.
"""

from __future__ import annotations

import itertools
import json
import random
import urllib.request

import pytest

from testing import cuda
from testing.child_process import wait_until
from testing.engine.process import EngineProcess, connector_config
from testing.processes import SidecarProcess
from tests.harness.gpu_engine import in_namespace

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BLOCK, CHUNK = 32, 256
ANSWER_SECONDS = 30.0
SALTS = map("salt {}".format, itertools.count())
OWN_PIDS = ["unshare", "--pid", "--fork", "--kill-child"]


def make_prompt(num_chunks, seed):
    tokens = random.Random(f"gpu {num_chunks} {seed}")
    return [tokens.randrange(4, 260) for _ in range(num_chunks * CHUNK + 5)]


PROMPT = make_prompt(4, 0)


@pytest.fixture(scope="module")
def node():
    with cuda.node() as node:
        yield node


@pytest.fixture(scope="module")
def sidecar(node):
    sidecar = SidecarProcess(memory_size="256Mi", transfer="Auto")
    sidecar.environment = node.environment("sidecar")
    sidecar.prefix = OWN_PIDS
    with sidecar:
        yield sidecar


def start_engine(node, sidecar, folder, pid=0):
    """Whose process id is 1 among its own, or ``pid``."""
    config = connector_config(sidecar.socket_path, answer_seconds=ANSWER_SECONDS)
    prefix = in_namespace([], pid) if pid else OWN_PIDS
    environment = node.environment("engine")
    return EngineProcess(folder / "log", config, environment, is_patient=True, prefix=prefix)


def stats(sidecar):
    with urllib.request.urlopen(f"{sidecar.url}/stats", timeout=30) as answer:
        return json.load(answer)


def wait_mode(sidecar, mode):
    wait_until(lambda: stats(sidecar)["transfer"]["mode"] == mode, timeout=60, what=f"copies by {mode}")


def wait_attached(sidecar):
    """Both sides of the engine's connector: the scheduler's finds, the worker's is copied for."""
    wait_mode(sidecar, "CudaIPC")
    what = "the engine's scheduler and worker are attached"
    wait_until(lambda: stats(sidecar)["num_clients"]["attached"] == 2, timeout=60, what=what)


def reader_pid(node):
    """As the reader itself knows it."""
    (reader,) = node.processes("sidecar")
    return reader["pid"]


def assert_hit(engine, prompt, computed):
    """The KV of the whole prompt is loaded, over blocks that were overwritten before."""
    engine.scrub_kv()
    (hit,) = engine.generate(prompt)
    num_loaded = len(prompt) // CHUNK * CHUNK
    assert hit.num_cached_tokens == num_loaded
    assert hit.tokens == computed.tokens
    for layer, (loaded, expected) in enumerate(zip(hit.kv, computed.kv, strict=True)):
        assert loaded[: num_loaded // BLOCK] == expected[: num_loaded // BLOCK], f"layer {layer}"


def cold(engine, prompt):
    """Without a hit: nothing is stored under a new salt, and KV does not depend on it."""
    (computed,) = engine.generate(prompt, cache_salt=next(SALTS))
    return computed


def store_and_load(engine, sidecar, node):
    """The sidecar copies what is stored, the engine what is loaded."""
    (stored,) = engine.generate(PROMPT)
    assert stored.num_cached_tokens == 0
    assert node.count("batches", "sidecar")
    assert not node.count("batches", "engine")
    assert stored.kv == cold(engine, PROMPT).kv
    assert_hit(engine, PROMPT, stored)
    assert node.count("batches", "engine") == 4
    assert not node.count("writes_to_imports", "sidecar"), "the sidecar only reads"
    return stored


def kill_engine_under_a_copy(engine, prompt, node):
    """The sidecar lets go of its memory at once; the process id of the reader."""
    node.order("sidecar: stall")
    before = node.count("batches", "sidecar")
    engine.start_generate(prompt)
    wait_until(lambda: node.count("batches", "sidecar") > before, timeout=60, what="a copy under way")
    pid = reader_pid(node)
    engine.kill()
    node.order("")
    wait_until(lambda: not node.count("mappings", "sidecar"), timeout=60, what="no mapping is left")
    return pid


def hang_reader(engine, sidecar, node):
    """The call is given up, then the reader is, and the engine copies for itself."""
    node.order("sidecar: stall")
    prompt = make_prompt(4, 2)
    assert engine.generate(prompt)[0].num_cached_tokens == 0
    wait_mode(sidecar, "SharedMemory")
    node.order("")
    assert "did not" in stats(sidecar)["transfer"]["reason"]
    before = node.count("batches", "engine")
    assert_hit(engine, prompt, engine.generate(prompt)[0])
    assert node.count("batches", "engine") > before


def kill_sidecar(engine, stored, sidecar):
    """The engine goes on, attaches again when it is back, and is copied for again."""
    sidecar.kill()
    assert cold(engine, PROMPT).tokens == stored.tokens
    sidecar.restart()
    wait_attached(sidecar)
    assert_hit(engine, PROMPT, stored)


def kill_reader_in_mid_copy(engine, sidecar, node):
    """Nothing is lost, not even this store."""
    node.order("sidecar: die_after 1")
    prompt = make_prompt(4, 3)
    computed = engine.generate(prompt)[0]
    node.order("")
    assert_hit(engine, prompt, computed)
    assert stats(sidecar)["transfer"]["mode"] == "SharedMemory"


def test_engine_sidecar_and_reader_are_lost_in_mid_copy_and_no_byte_is_wrong(tmp_path, sidecar, node):
    prompt = make_prompt(4, 1)
    with start_engine(node, sidecar, tmp_path) as engine:
        engine.wait_ready(240)
        wait_attached(sidecar)
        stored = store_and_load(engine, sidecar, node)
        pid = kill_engine_under_a_copy(engine, prompt, node)
    with start_engine(node, sidecar, tmp_path, pid) as engine:
        engine.wait_ready(240)
        wait_attached(sidecar)
        assert [process["pid"] for process in node.processes("engine")] == [pid]
        assert reader_pid(node) != pid, "another reader took its place"
        assert_hit(engine, PROMPT, stored)
        assert_hit(engine, prompt, engine.generate(prompt)[0])
        hang_reader(engine, sidecar, node)
        kill_sidecar(engine, stored, sidecar)
        kill_reader_in_mid_copy(engine, sidecar, node)
    wait_until(lambda: not node.processes(), timeout=60, what="a reader that nobody needs has ended")
