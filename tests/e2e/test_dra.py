"""Engine and sidecar share a simulated GPU by a claim, with a real kubelet, DRA driver, CDI and containers.

The tests of ``on_gpu`` depend on their order: each continues with the pod as the previous test left it.
"""

import contextlib
import json
import subprocess
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
from tests.harness.commands.programs import IDLE, offer_programs, use_program

PROGRAMS = "programs"
CHUNK, BLOCK = 256, 32
PLUGIN_RESOURCE = "lmcache.test/gpu"
WAIT_SECONDS = 180

# The vLLM of the image, with KV on the GPU.
SERVED = """#!/bin/sh
PYTHONPATH="$PYTHONPATH:/opt/test" exec python -m testing.engine.served "$@"
"""
TESTING = REPOSITORY / "testing"
MODULES = "workers.py", *(f"engine/{path.name}" for path in TESTING.glob("engine/*.py"))


def make_prompt(number: int) -> list[int]:
    return [4 + (7 * number + 11 * position + position // 251) % 256 for position in range(8 * CHUNK + 5)]


PROMPT, OTHER_PROMPT = map(make_prompt, range(2))


@pytest.fixture(scope="module")
def gpus(installed):
    """A DRA driver with two GPUs."""
    driver = GpuDriver(installed.api, NODE, 2, cdi=CDI, state=Path("/dev/shm/gpus"))
    with KubeletPlugin(driver, KUBELET_ROOT) as plugin:
        plugin.wait_registered()
        yield driver
        driver.retire()


@pytest.fixture(scope="module")
def programs(installed):
    """ConfigMap with two versions of ``vllm``, to be mounted as a volume."""
    modules = {module.replace("/", "-"): (TESTING / module).read_text() for module in MODULES}
    offer_programs(installed, PROGRAMS, served=SERVED, idle=IDLE, **modules)


def on_program(app, program, gpu):
    """Let the app's engine run this version of ``vllm``, with GPUs and without Redis."""
    spec = app.spec["spec"]
    del spec["tiers"]["remote"]
    spec["engine"]["gpu"] = gpu
    use_program(app, PROGRAMS, program, MODULES)
    template = spec["engine"]["podTemplate"]["spec"]
    template["containers"][0]["env"] += env(CUDASIM_ROLE="engine")
    template["initContainers"] = [{"name": "sidecar", "env": env(CUDASIM_ROLE="sidecar")}]
    return app


def wait(app, condition):
    """Poll until the condition is true. Fails if the node is unhealthy."""

    def check():
        app.node.check()
        return condition()

    return wait_for(check, READY_SECONDS, 0.5)


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
    """Whether the pod is ready. Raises AssertionError if the engine has ended, to end the wait."""
    with contextlib.suppress(ApiError, StopIteration):  # the pod does not exist yet
        pod = app.pod()
        assert pod.container("engine")["restartCount"] == 0, pod.logs("engine", "--previous")
        return pod.is_ready


@pytest.fixture
def claim(on_gpu, gpus):
    """The GPU of the pod's claim."""
    (status,) = on_gpu.pod().object["status"]["resourceClaimStatuses"]
    claim_object = on_gpu.node.api.get(CLAIMS, status["resourceClaimName"], NAMESPACE)
    return gpus.gpus_of(claim_object["metadata"]["uid"])


def transfer(app):
    return app.node.api.get(CLUSTERS, app.name, NAMESPACE)["status"].get("transfer", {})


def wait_transfer(app, mode, reason):
    def is_reported():
        status = transfer(app)
        return (status.get("mode"), status.get("reason")) == (mode, reason)

    wait(app, is_reported)


def wait_copies(app):
    """Wait until the sidecar copies. Returns its transfer statistics."""

    def statistics():
        stats = app.pod().stats()["transfer"]
        return stats if stats["mode"] == "CudaIPC" and stats["num_workers"]["CudaIPC"] else None

    return wait(app, statistics)


# ---- answers of engines, and the KV that they used ----


class Answer:
    def __init__(self, pod, prompt, **options):
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://{pod.address}:{ENGINE_PORT}/v1/completions",
            json.dumps(body | {"return_token_ids": True} | options).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as response:
            answer = json.load(response)
        self.tokens = answer["choices"][0]["token_ids"]
        self.num_cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"] or 0
        lines = map(json.loads, pod.exec("engine", "sh", "-c", f'cat "$HOME/{KV_FILE}"').splitlines())
        (self.kv,) = (kv for request_id, kv in lines if request_id.startswith(answer["id"]))


def cold(pod, prompt, salt):
    """Compute the whole prompt: nothing is stored under the new salt, and KV does not depend on the salt."""
    answer = Answer(pod, prompt, cache_salt=salt)
    assert answer.num_cached == 0
    return answer


def assert_hit(app, gpu, prompt, computed):
    """Repeat the request until the whole prompt is loaded. Every answer must have the right KV."""
    pod, num_tokens = app.pod(), len(prompt) // CHUNK * CHUNK

    def is_loaded():
        pod.reset_engine_cache()
        num_batches = gpu.num_copies("engine")
        answer = Answer(pod, prompt)
        assert answer.tokens == computed.tokens
        num_blocks = answer.num_cached // BLOCK
        for layer, (loaded, expected) in enumerate(zip(answer.kv, computed.kv, strict=True)):
            assert loaded[:num_blocks] == expected[:num_blocks], f"layer {layer}"
        return answer.num_cached == num_tokens and gpu.num_copies("engine") > num_batches

    wait(app, is_loaded)


# ---- one pod ----


def visible_devices(pod, container):
    """The CUDA variable and device paths that the runtime gave a container, whether it runs or has ended."""
    container_id = pod.container(container)["containerID"].rpartition("/")[2]
    spec = json.loads(pod.node.containerd.ctr("containers", "info", container_id))["Spec"]
    variables = dict(line.split("=", 1) for line in spec["process"]["env"])
    paths = [device["path"] for device in spec["linux"].get("devices", [])]
    paths += [mount["destination"] for mount in spec["mounts"]]
    gpus = [path for path in paths if path.startswith("/dev/gpu-") or path == GPUS_DIR or "libcuda" in path]
    return variables.get("CUDASIM_DEVICES"), sorted(gpus)


def test_only_engine_and_sidecar_have_the_gpu_of_the_claim(on_gpu, gpus, claim):
    pod = on_gpu.pod()
    assert visible_devices(pod, "payload") == (None, [])
    engine = visible_devices(pod, "engine")
    assert engine == visible_devices(pod, "sidecar")
    assert engine[0] == ",".join(gpus.prepared()[claim.path.name])
    assert len(engine[1]) == 3
    namespaces = {pod.exec(name, "readlink", "/proc/1/ns/pid") for name in ("engine", "sidecar")}
    assert len(namespaces) == 2, "the containers must not share process ids"


def test_sidecar_reads_the_engines_memory_across_containers(on_gpu, claim):
    pod = on_gpu.pod()
    wait_copies(on_gpu)
    wait_transfer(on_gpu, "CudaIPC", "DRAClaimShared")
    computed = cold(pod, PROMPT, "a")
    assert_hit(on_gpu, claim, PROMPT, computed)
    stats = pod.stats()["transfer"]
    assert (stats["copied_slots"] >= 8, stats["failed_slots"]) == (True, 0), stats
    assert not claim.count("writes_to_imports"), "the sidecar must only read"
    on_gpu.wait_condition("Ready")
    assert on_gpu.conditions()["Degraded"]["status"] == "False"


def pids_of(pod, container):
    """Processes of a container: process ids of the node, by process id in the container."""
    pids = {}
    for pid in (pod.group(container) / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):  # the process has ended
            status = Path("/proc", pid, "status").read_text()
            line = next(line for line in status.splitlines() if line.startswith("NSpid:"))
            pids[int(line.split()[-1])] = int(pid)
    return pids


def test_reader_never_has_the_process_id_of_the_engine(on_gpu, claim):
    """A driver takes two processes with the same number for one process, even in different containers."""
    pod = on_gpu.pod()
    wait_copies(on_gpu)
    (exporter,) = [process["pid"] for process in claim.processes("engine") if process["allocations"]]
    (reader,) = [process["pid"] for process in claim.processes("sidecar")]
    processes = pids_of(pod, "sidecar")
    assert {1} <= processes.keys() & pids_of(pod, "engine").keys(), "each container must have its own ids"
    set_last_pid = f"echo {exporter - 1} >/proc/sys/kernel/ns_last_pid"
    subprocess.run(["nsenter", "--target", str(processes[1]), "--pid", "sh", "-c", set_last_pid], check=True)
    subprocess.run(["kill", "-KILL", str(processes[reader])], check=True)

    def new_reader():
        pids = [process["pid"] for process in claim.processes("sidecar") if process["mappings"]]
        return pids[0] if pids and pids[0] != reader else None

    # The next process gets the engine's number, so it must not become the reader.
    assert exporter < wait(on_gpu, new_reader) < exporter + 50
    wait_copies(on_gpu)
    assert_hit(on_gpu, claim, OTHER_PROMPT, cold(pod, OTHER_PROMPT, "b"))


# ---- a device plugin ----


def test_gpu_of_a_device_plugin_belongs_to_the_engine_only(make_app, node, programs):
    node.set_capacity(PLUGIN_RESOURCE, 1)
    app = on_program(make_app("plugin"), "idle", {"resourceName": PLUGIN_RESOURCE})
    app.apply()
    try:
        pod = app.ready_pod()
        assert pod.object["spec"]["containers"][0]["resources"]["limits"][PLUGIN_RESOURCE] == "1"
        assert pod.exec("sidecar", "printenv", "NVIDIA_VISIBLE_DEVICES").strip() == "void"
        assert visible_devices(pod, "sidecar") == (None, [])
        wait_transfer(app, "SharedMemory", "GPUNotShared")
    finally:
        app.delete()
