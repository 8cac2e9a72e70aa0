"""A real vLLM with KV in memory of the simulated GPU, and a real sidecar that reads it over CUDA IPC.

Both run in their own PID namespaces, like two containers, so that their process ids are often equal. Engines
and the sidecar's reader are frozen and killed during copies, and restarted.
"""

import pytest

from testing import cuda
from testing.child_process import wait_until
from testing.deadlines import PATIENT
from testing.engine.environment import PROCESS
from testing.engine.process import EngineProcess, patient_config
from testing.processes import SidecarProcess
from tests.harness.client import real_engine
from tests.harness.client.real_engine import CHUNK, assert_loaded, cold

DEADLINES = f"{PATIENT},copy_seconds=15"
"""The engine polls until a stalled copy of the sidecar times out."""

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PID_NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child"]


def make_prompt(num_chunks, seed):
    return real_engine.make_prompt(num_chunks * CHUNK + 5, f"gpu {seed}")


PROMPT = make_prompt(4, 0)


@pytest.fixture(scope="module")
def node():
    with cuda.node() as node:
        yield node


@pytest.fixture(scope="module")
def sidecar(node):
    sidecar = SidecarProcess(memory_size="256Mi", transfer="Auto")
    sidecar.environment = node.environment("sidecar")
    sidecar.prefix = PID_NAMESPACE
    with sidecar:
        yield sidecar


def start_engine(node, sidecar, folder, pid=1):
    """Start an engine whose process has this id in its namespace."""
    environment = node.environment("engine") | {PROCESS: str(pid)}
    return EngineProcess(folder / "log", patient_config(sidecar.socket_path), environment)


def wait_mode(sidecar, mode):
    sidecar.wait_until(lambda stats: stats["transfer"]["mode"] == mode)


def wait_attached(sidecar, engine):
    """Wait until both sides of the connector are attached: scheduler for lookups, worker for copies."""
    wait_mode(sidecar, "CudaIPC")
    sidecar.wait_attached(engine.run_short_request)


def reader_pid(node):
    """The reader's process id in its own namespace."""
    (reader,) = node.processes("sidecar")
    return reader["pid"]


def assert_hit(engine, prompt, computed):
    """Check that the KV of the whole prompt is loaded into blocks that were overwritten before."""
    engine.scrub_kv()
    (hit,) = engine.generate(prompt)
    assert_loaded(hit, computed, len(prompt) // CHUNK * CHUNK)
    assert hit.tokens == computed.tokens


def store_and_load(engine, sidecar, node):
    """Store and load a prompt. The sidecar copies stored KV, and the engine copies loaded KV."""
    (stored,) = engine.generate(PROMPT)
    assert stored.num_cached_tokens == 0
    assert node.num_copies("sidecar")
    assert not node.num_copies("engine")
    assert stored.kv == cold(engine, PROMPT)[0].kv
    assert_hit(engine, PROMPT, stored)
    assert node.num_copies("engine") >= 4
    assert not node.count("writes_to_imports", "sidecar"), "the sidecar must only read"
    return stored


def kill_engine_during_a_copy(engine, prompt, node):
    """Kill the engine during a copy. The sidecar closes its memory. Returns the reader's process id."""
    node.order("sidecar: stall")
    num_batches_before = node.num_copies("sidecar")
    engine.start_generate(prompt)
    wait_until(lambda: node.num_copies("sidecar") > num_batches_before, timeout=60, what="a copy in progress")
    pid = reader_pid(node)
    engine.kill()
    node.order("")
    wait_until(lambda: not node.count("mappings", "sidecar"), timeout=60, what="all mappings are closed")
    return pid


def hang_reader(engine, sidecar, node):
    """Stall the reader. The call times out, then the sidecar ends the reader, and the engine copies."""
    node.order("sidecar: stall")
    prompt = make_prompt(4, 2)
    assert engine.generate(prompt)[0].num_cached_tokens == 0
    wait_mode(sidecar, "SharedMemory")
    node.order("")
    assert "did not" in sidecar.stats()["transfer"]["reason"]
    num_batches_before = node.num_copies("engine")
    assert_hit(engine, prompt, engine.generate(prompt)[0])
    assert node.num_copies("engine") > num_batches_before


def kill_sidecar(engine, stored, sidecar):
    """Restart the sidecar. The engine keeps running, attaches again, and the sidecar copies again."""
    sidecar.kill()
    assert cold(engine, PROMPT)[0].tokens == stored.tokens
    sidecar.restart()
    wait_attached(sidecar, engine)

    def are_verified():
        """Look up the rows in the arena. The first requests may not wait until they are verified."""
        engine.generate(PROMPT)
        return sidecar.stats()["memory"]["verified"] == len(PROMPT) // CHUNK

    wait_until(are_verified, timeout=60, what="verified rows")
    assert_hit(engine, PROMPT, stored)


def kill_reader_during_a_copy(engine, sidecar, node):
    """Kill the reader during a copy. Nothing is lost, not even this store."""
    node.order("sidecar: die_after 1")
    prompt = make_prompt(4, 3)
    computed = engine.generate(prompt)[0]
    node.order("")
    assert_hit(engine, prompt, computed)
    assert sidecar.stats()["transfer"]["mode"] == "SharedMemory"


def test_kv_is_right_after_engine_sidecar_and_reader_failed_during_copies(tmp_path, sidecar, node):
    prompt = make_prompt(4, 1)
    with start_engine(node, sidecar, tmp_path) as engine:
        engine.wait_ready(240)
        wait_attached(sidecar, engine)
        stored = store_and_load(engine, sidecar, node)
        pid = kill_engine_during_a_copy(engine, prompt, node)
    with start_engine(node, sidecar, tmp_path, pid) as engine:
        engine.wait_ready(240)
        wait_attached(sidecar, engine)
        assert [process["pid"] for process in node.processes("engine")] == [pid]
        assert reader_pid(node) != pid, "a new reader must replace the old one"
        assert_hit(engine, PROMPT, stored)
        assert_hit(engine, prompt, engine.generate(prompt)[0])
        hang_reader(engine, sidecar, node)
        kill_sidecar(engine, stored, sidecar)
        kill_reader_during_a_copy(engine, sidecar, node)
    wait_until(lambda: not node.processes(), timeout=60, what="the unused reader has ended")
