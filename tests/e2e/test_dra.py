"""Engine and sidecar share a GPU by a claim: a real kubelet, driver, CDI and containers; a simulated GPU.

The tests of ``on_gpu`` follow one another: each begins where the one before it left the pod.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import urllib.request
from pathlib import Path

import pytest

from testing.child_process import REPOSITORY
from testing.dra.driver import CLAIMS, GPUS_DIR, NAME, GpuDriver
from testing.dra.plugin import KubeletPlugin
from testing.engine.served import KV_FILE
from testing.kube.api import ApiError, wait_for
from testing.kube.operator import CLUSTERS
from testing.node.app import NAMESPACE, READY_SECONDS
from testing.node.cluster import KUBELET_ROOT, NODE
from testing.node.containerd import CDI
from testing.node.pods import ENGINE_PORT
from tests.harness.programs import IDLE, offer_programs, use_program

PROGRAMS = "programs"
CHUNK, BLOCK = 256, 32
PLUGIN_RESOURCE = "lmcache.test/gpu"
WAIT_SECONDS = 180

# The image's own vLLM, with KV on the GPU.
SERVED = """#!/bin/sh
PYTHONPATH="$PYTHONPATH:/opt/test" exec python -m testing.engine.served "$@"
"""
MODULES = ("kv_digests", "served", "simulated_gpu")


def make_prompt(number: int) -> list[int]:
    return [4 + (7 * number + 11 * position + position // 251) % 256 for position in range(8 * CHUNK + 5)]


PROMPT, OTHER_PROMPT, THIRD_PROMPT = map(make_prompt, range(3))


@pytest.fixture(scope="module")
def gpus(installed):
    """Two GPUs."""
    driver = GpuDriver(installed.api, NODE, 2, cdi=CDI, state=Path("/dev/shm/gpus"))
    with KubeletPlugin(driver, KUBELET_ROOT) as plugin:
        plugin.wait_registered()
        yield driver
        driver.retire()


@pytest.fixture(scope="module")
def programs(installed):
    """Two kinds of ``vllm``, for volumes."""
    modules = {f"{name}.py": (REPOSITORY / "testing/engine" / f"{name}.py").read_text() for name in MODULES}
    offer_programs(installed, PROGRAMS, served=SERVED, idle=IDLE, **modules)


def on_program(app, program, gpu, **engine):
    """The app with that ``vllm``, without Redis, with GPUs."""
    spec = app.spec["spec"]
    del spec["tiers"]["remote"]
    spec["engine"] |= {"gpu": gpu, **engine}
    use_program(app, PROGRAMS, program, MODULES)
    template = spec["engine"]["podTemplate"]["spec"]
    template["containers"][0]["env"] += env(CUDASIM_ROLE="engine")
    template["initContainers"] = [{"name": "sidecar", "env": env(CUDASIM_ROLE="sidecar")}]
    return app


def wait(app, what):
    """Poll until it is true, and the node is well."""

    def look():
        app.node.check()
        return what()

    return wait_for(look, READY_SECONDS, 0.5)


def env(**variables):
    return [{"name": name, "value": value} for name, value in variables.items()]


@pytest.fixture(scope="module")
def on_gpu(make_app, gpus, programs):
    app = on_program(make_app("gpu"), "served", {"deviceClassName": NAME})
    app.spec["spec"]["sidecar"] = {"transfer": "CudaIPC"}
    app.apply()
    wait(app, lambda: is_up(app))
    app.node.reached("engine on a GPU ready")
    yield app
    app.delete()


def is_up(app):
    """Raises AssertionError when the engine has ended: waiting would not help."""
    with contextlib.suppress(ApiError, StopIteration):  # not there yet
        pod = app.pod()
        assert pod.container("engine")["restartCount"] == 0, pod.logs("engine", "--previous")
        return pod.is_ready


@pytest.fixture
def claim(on_gpu, gpus):
    """The GPU of the pod's claim."""
    (status,) = on_gpu.pod().object["status"]["resourceClaimStatuses"]
    found = on_gpu.node.api.get(CLAIMS, status["resourceClaimName"], NAMESPACE)
    return gpus.gpus_of(found["metadata"]["uid"])


def transfer(app):
    return app.node.api.get(CLUSTERS, app.name, NAMESPACE)["status"].get("transfer", {})


def wait_transfer(app, mode, reason):
    def is_told():
        found = transfer(app)
        return (found.get("mode"), found.get("reason")) == (mode, reason)

    wait(app, is_told)


def wait_copies(app):
    """Until the sidecar copies; what it says of it."""

    def look():
        found = app.pod().stats()["transfer"]
        return found if found["mode"] == "CudaIPC" and found["num_workers"]["CudaIPC"] else None

    return wait(app, look)


def wait_restarted(app, before, container):
    """The pod, when the kubelet has started that container again and the pod is Ready."""
    count = before.container(container)["restartCount"]
    wait(app, lambda: app.pod().container(container)["restartCount"] > count)
    after = app.ready_pod()
    assert after.uid == before.uid
    return after


# ---- what engines answer, and from which KV ----


class Answer:
    def __init__(self, pod, prompt, **options):
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://{pod.address}:{ENGINE_PORT}/v1/completions",
            json.dumps(body | {"return_token_ids": True} | options).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
            found = json.load(answer)
        self.tokens = found["choices"][0]["token_ids"]
        self.num_cached = found["usage"]["prompt_tokens_details"]["cached_tokens"] or 0
        lines = map(json.loads, pod.exec("engine", "sh", "-c", f'cat "$HOME/{KV_FILE}"').splitlines())
        (self.kv,) = (kv for request_id, kv in lines if request_id.startswith(found["id"]))


def cold(pod, prompt, salt):
    """Computed whole: nothing is found under a new salt, and KV does not depend on it."""
    answer = Answer(pod, prompt, cache_salt=salt)
    assert answer.num_cached == 0
    return answer


def assert_hit(app, gpu, prompt, computed):
    """The prompt's KV is loaded, whole, sooner or later; at no time is a byte wrong."""
    pod, whole = app.pod(), len(prompt) // CHUNK * CHUNK

    def is_loaded():
        pod.reset_engine_cache()
        before = gpu.count("batches", "engine")
        answer = Answer(pod, prompt)
        assert answer.tokens == computed.tokens
        num_blocks = answer.num_cached // BLOCK
        for layer, (loaded, right) in enumerate(zip(answer.kv, computed.kv, strict=True)):
            assert loaded[:num_blocks] == right[:num_blocks], f"layer {layer}"
        return answer.num_cached == whole and gpu.count("batches", "engine") > before

    wait(app, is_loaded)


# ---- one pod ----


def seen_devices(pod, container):
    """What the container runtime gave a container, running or ended: variables, and paths of devices."""
    found = pod.container(container)["containerID"].rpartition("/")[2]
    spec = json.loads(pod.node.containerd.ctr("containers", "info", found))["Spec"]
    variables = dict(line.split("=", 1) for line in spec["process"]["env"])
    paths = [device["path"] for device in spec["linux"].get("devices", [])]
    paths += [mount["destination"] for mount in spec["mounts"]]
    gpus = [path for path in paths if path.startswith("/dev/gpu-") or path == GPUS_DIR or "libcuda" in path]
    return variables.get("CUDASIM_DEVICES"), sorted(gpus)


def test_both_containers_have_the_claim_s_gpu_and_no_other_has_it(on_gpu, gpus, claim):
    pod = on_gpu.pod()
    assert seen_devices(pod, "payload") == (None, [])
    engine = seen_devices(pod, "engine")
    assert engine == seen_devices(pod, "sidecar")
    assert engine[0] == ",".join(gpus.prepared()[claim.path.name])
    assert len(engine[1]) == 3
    namespaces = {pod.exec(name, "readlink", "/proc/1/ns/pid") for name in ("engine", "sidecar")}
    assert len(namespaces) == 2, "they share no process ids"


def test_the_sidecar_reads_the_engine_s_memory_across_containers(on_gpu, claim):
    pod = on_gpu.pod()
    wait_copies(on_gpu)
    wait_transfer(on_gpu, "CudaIPC", "DRAClaimShared")
    computed = cold(pod, PROMPT, "a")
    assert_hit(on_gpu, claim, PROMPT, computed)
    found = pod.stats()["transfer"]
    assert (found["copied_slots"] >= 8, found["failed_slots"]) == (True, 0), found
    assert not claim.count("writes_to_imports"), "the sidecar only reads"
    on_gpu.wait_condition("Ready")
    assert on_gpu.conditions()["Degraded"]["status"] == "False"


def pids_of(pod, container):
    """Its processes: by id in the container, the id here."""
    found = {}
    for pid in (pod.group(container) / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):  # ended meanwhile
            status = Path("/proc", pid, "status").read_text()
            line = next(line for line in status.splitlines() if line.startswith("NSpid:"))
            found[int(line.split()[-1])] = int(pid)
    return found


def test_no_reader_has_the_engine_s_process_id(on_gpu, claim):
    """A driver takes a process with the same number for the same process, in whatever container it is."""
    pod = on_gpu.pod()
    wait_copies(on_gpu)
    (exporter,) = [process["pid"] for process in claim.processes("engine") if process["allocations"]]
    (reader,) = [process["pid"] for process in claim.processes("sidecar")]
    processes = pids_of(pod, "sidecar")
    assert {1} <= processes.keys() & pids_of(pod, "engine").keys(), "ids are the containers' own"
    next_one = f"echo {exporter - 1} >/proc/sys/kernel/ns_last_pid"
    subprocess.run(["nsenter", "--target", str(processes[1]), "--pid", "sh", "-c", next_one], check=True)
    subprocess.run(["kill", "-KILL", str(processes[reader])], check=True)

    def another():
        found = [process["pid"] for process in claim.processes("sidecar") if process["mappings"]]
        return found[0] if found and found[0] != reader else None

    # The next process has the engine's number, and is not taken for a reader.
    assert exporter < wait(on_gpu, another) < exporter + 50
    wait_copies(on_gpu)
    assert_hit(on_gpu, claim, OTHER_PROMPT, cold(pod, OTHER_PROMPT, "b"))


def test_nothing_of_an_engine_that_is_killed_in_mid_copy_is_served(on_gpu, claim):
    pod = on_gpu.pod()
    right = cold(pod, THIRD_PROMPT, "c")
    right_before = cold(pod, PROMPT, "d")
    claim.order("sidecar: stall")
    before, num_failed = claim.count("batches", "sidecar"), num_failed_readers(pod)
    asking = threading.Thread(target=ask_what_may_break, args=(pod, THIRD_PROMPT))
    asking.start()
    # A reader that hangs for some seconds is killed: on a slow machine we may come too late.
    wait(on_gpu, lambda: claim.count("batches", "sidecar") > before or num_failed_readers(pod) > num_failed)
    kill_engine(on_gpu, claim, asking)
    wait_copies(on_gpu)
    assert_hit(on_gpu, claim, THIRD_PROMPT, right)
    assert_hit(on_gpu, claim, PROMPT, right_before)
    assert claim.count("batches", "sidecar"), "the sidecar copies again"


def num_failed_readers(pod):
    return pod.stats()["transfer"]["failed_readers"]


def ask_what_may_break(pod, prompt):
    with contextlib.suppress(OSError, subprocess.CalledProcessError, ValueError):
        Answer(pod, prompt)


def kill_engine(app, gpu, asking):
    """Until it is back; its memory is not kept from the next one."""
    before = app.pod()
    before.kill("engine")
    gpu.order("")
    asking.join(WAIT_SECONDS)
    wait(app, lambda: not gpu.count("mappings", "sidecar"))
    wait_restarted(app, before, "engine")


def test_a_killed_sidecar_is_attached_to_again(on_gpu, claim):
    pod = on_gpu.pod()
    engine = pod.container("engine")["containerID"]
    right = cold(pod, PROMPT, "e")
    pod.kill("sidecar")
    pod = wait_restarted(on_gpu, pod, "sidecar")
    assert pod.container("engine")["containerID"] == engine
    wait_copies(on_gpu)
    assert_hit(on_gpu, claim, PROMPT, right)
    fourth = make_prompt(4)
    assert_hit(on_gpu, claim, fourth, cold(pod, fourth, "f"))
    assert claim.count("copied_bytes", "sidecar")
    wait_transfer(on_gpu, "CudaIPC", "DRAClaimShared")


# ---- several pods ----


def test_pods_wait_for_devices_and_give_them_back(make_app, gpus, programs, on_gpu):
    """``on_gpu`` has one of two GPUs."""
    app = on_program(make_app("spare"), "idle", {"deviceClassName": NAME}, replicas=2)
    app.apply()
    try:
        degraded = wait(app, lambda: is_unschedulable(app))
        assert "cannot allocate all claims" in degraded["message"]
        served = wait(app, lambda: [pod for pod in app.pods() if pod.is_ready])
        assert len(served) == 1
        uuids = [uuid for uuids in gpus.prepared().values() for uuid in uuids]
        assert len(set(uuids)) == len(uuids) == 2
        assert seen_devices(served[0], "sidecar")[0] in uuids
    finally:
        app.delete()
    wait(app, lambda: len(gpus.prepared()) == 1)
    wait(app, lambda: len(app.node.api.objects(CLAIMS, NAMESPACE)) == 1)


def is_unschedulable(app):
    degraded = app.conditions().get("Degraded", {})
    return degraded if degraded.get("reason") == "Unschedulable" else None


def test_a_device_plugin_s_gpu_is_the_engine_s_alone(make_app, node, programs):
    node.set_capacity(PLUGIN_RESOURCE, 1)
    app = on_program(make_app("plugin"), "idle", {"resourceName": PLUGIN_RESOURCE})
    app.apply()
    try:
        pod = app.ready_pod()
        assert pod.object["spec"]["containers"][0]["resources"]["limits"][PLUGIN_RESOURCE] == "1"
        assert pod.exec("sidecar", "printenv", "NVIDIA_VISIBLE_DEVICES").strip() == "void"
        assert seen_devices(pod, "sidecar") == (None, [])
        wait_transfer(app, "SharedMemory", "GPUNotShared")
    finally:
        app.delete()
