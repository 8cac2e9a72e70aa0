"""The engine's command line, and the termination of its pod."""

import json
from typing import Any

import pytest

from lmcache_operator.api.parse import parse
from lmcache_operator.components.engine.kinds.vllm import VLLM
from lmcache_operator.errors import InvalidSpecError
from tests.harness.operator.model import cluster
from tests.harness.operator.render import env_of, pod_of


def test_engine_without_gpus_gets_no_layout_of_its_kv() -> None:
    """The golden files have the configuration of engines with GPUs."""
    rendered = VLLM().args(parse(cluster(engine={"gpu": {"count": 0}})), 60)
    (argument,) = [arg for arg in rendered if arg.startswith("--kv-transfer-config=")]
    settings = json.loads(argument.partition("=")[2])["kv_connector_extra_config"]
    assert settings == {"lmcache.socket": "/run/lmcache/kvcache.sock", "lmcache.chunk_tokens": 256}


GPU_CLAIM = {"count": 1, "deviceClassName": "gpu.nvidia.com", "resourceName": None}


def gpu_share(args: list[str], **spec: Any) -> list[str]:
    """Arguments of the engine that set its share of GPU memory."""
    engine = pod_of(engine={"args": args, "gpu": GPU_CLAIM}, **spec)["containers"][0]
    return [arg for arg in engine["args"] if arg.startswith(("--gpu-memory", "--gpu_memory"))]


def test_engine_leaves_gpu_memory_for_the_reader_of_the_sidecar() -> None:
    assert gpu_share([]) == ["--gpu-memory-utilization=0.9"]
    assert gpu_share(["--gpu_memory_util", "0.5"]) == ["--gpu_memory_util"], "the user's value counts"
    assert gpu_share(["--kv-cache-memory-bytes=1G"]) == [], "this option replaces the share"
    assert gpu_share([], sidecar={"transfer": "SharedMemory"}) == [], "the sidecar has no reader"


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--kv-transfer-config={}"], "--kv-transfer-config can't be set: it loads LMCache"),
        (["--kv_transfer_config", "{}"], "--kv-transfer-config can't be set"),
        (["--kv-transfer-config.kv_connector=X"], "--kv-transfer-config can't be set"),
        (["--port=1"], "--port can't be set"),
        (["--prefix_caching_hash_algo", "xxhash"], "--prefix-caching-hash-algo can't be set"),
        (["--no-enable-prefix-caching"], "can't be set"),
        # The engine accepts abbreviations of options.
        (["--por=1"], "--port can't be set"),
        (["--tensor-parallel=2"], "--tensor-parallel-size can't be set"),
        (["-t", "2"], "-tp can't be set: it is set by spec.engine.parallelism.tensor"),
        (["-pc", "2"], "-pcp can't be set: the engine would run without its cache"),
        (["--kv-transfer-conf={}"], "--kv-transfer-config can't be set"),
        (["--kv-transfer-conf.kv_connector=X"], "--kv-transfer-config can't be set"),
        (["--nn=2"], "set only spec.engine.nodes"),
        (["-n", "2"], "set only spec.engine.nodes"),
        (["--prefill-context-parallel-size=2"], "the engine would run without its cache"),
        (["--data-parallel-size.x=2"], "--data-parallel-size can't be set: it is set by spec.engine.parall"),
        (["--data_parallel_rank=1"], "--data-parallel-rank can't be set: the operator places"),
        (["-dpl=2"], "-dpl can't be set: the operator places"),
        (["--data-parallel-ext"], "the operator places the ranks: set only spec.engine.parallelism.data"),
        (["--data-parallel-backend=ray"], "Ray may start ranks in other pods: set only spec.engine"),
        (["--enable-elastic"], "--enable-elastic-ep can't be set: it changes the number of ranks while"),
        (["--uds=/tmp/engine.sock"], "expect the engine's HTTP server on a port"),
        (["--grpc"], "expect the engine's HTTP server on a port"),
        (["--kv-offloading-size=8"], "would replace LMCache"),
        (["--config=/models/all.yaml"], "a file may hold options that can't be set"),
        (["--conf", "/models/all.yaml"], "a file may hold options that can't be set"),
        (["--enable-sleep-mode"], "the engine would run without its cache"),
        (["--enable_return_routed"], "the engine would run without its cache"),
        (["-dcp=2"], "the engine would run without its cache"),
        (["--ec-transfer-config={}"], "set spec.engine.prefill for vLLM; no other split is possible"),
        (
            ["--kv-transfer-config", '{"kv_role": "kv_producer"}'],
            "to split prefill and decode over pods, set",
        ),
        (["-n2"], "set only spec.engine.nodes"),
        (["-n+2"], "set only spec.engine.nodes"),
        (["-r 1"], "set only spec.engine.nodes"),
        (["-r0"], "set only spec.engine.nodes"),
        (["--master-addr=h"], "set only spec.engine.nodes"),
        (["--distributed-executor-backend=ray"], "can't be ray: to spread an engine over pods, set only"),
        (["--dist", "external_launcher"], "can't be external_launcher: to spread an engine over pods"),
        (["--ssl-cert-reqs=2"], "the kubelet's probes have no certificate"),
        (["other/model"], "'other/model' belongs to no option"),
        (["--dtype=half", "other/model"], "'other/model' belongs to no option"),
        (["--", "other/model"], "taken for a second model"),
        (["--block-size=48"], "chunkTokens (256) must be a multiple of the block size"),
        (["--block_size", "48"], "chunkTokens (256) must be a multiple of the block size"),
        (["--block-siz=0"], "chunkTokens (256) must be a multiple of the block size"),
    ],
)
def test_engine_args_refuses_arguments_that_break_the_cache(args: list[str], sentence: str) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        VLLM().args(parse(cluster(engine={"args": args})), 60)
    assert caught.value.path.startswith("spec.engine.args[")
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "args",
    [
        ["--block-size=32"], ["--block-size", "128"], ["--lora-modules", "a=b", "c=d"], ["--seed", "-1"],
        ["--served-model-name", "llm", "llama"], ["--enforce-eager"], ["--grpc-port=1"],
        ["--distributed-executor-backend=mp"], ["--config-format=hf"], ["--no-enable-sleep-mode"],
        ["-q", "fp8"], ["-nx"], ["-dc={}"],
    ],
)  # fmt: skip
def test_engine_args_passes_other_arguments_on(args: list[str]) -> None:
    assert VLLM().args(parse(cluster(engine={"args": args})), 60)[-len(args) :] == args


def test_data_and_expert_parallelism_of_one_pod() -> None:
    """The golden files show that neither changes a pod that does not set them."""
    parallelism = {"tensor": 2, "data": 4, "expert": True}
    (engine,) = pod_of(engine={"gpu": {"count": 8}, "parallelism": parallelism})["containers"]
    rendered = {"--data-parallel-size=4", "--enable-expert-parallel", "--api-server-count=1"}
    assert rendered <= set(engine["args"])
    resources = engine["resources"]
    assert resources["requests"] == {"cpu": "8", "memory": "32Gi"}
    assert resources["limits"] == {"nvidia.com/gpu": "8"}


def test_probes_use_https_when_the_engine_has_a_certificate() -> None:
    def schemes(*args: str) -> set[str | None]:
        engine = pod_of(engine={"args": list(args)})["containers"][0]
        probes = [engine[name] for name in ("livenessProbe", "readinessProbe", "startupProbe")]
        return {probe["httpGet"].get("scheme") for probe in probes}

    assert schemes() == {None}
    assert schemes("--ssl-keyfile=/tls/tls.key", "--ssl-certfile", "/tls/tls.crt") == {"HTTPS"}


def termination_of(args: list[str], spec: dict[str, Any]) -> tuple[list[str], Any, Any]:
    """Shutdown timeouts of the engine, its preStop handler, and the pod's grace period."""
    rendered = pod_of(engine={"args": args, "podTemplate": {"spec": spec}})
    engine = rendered["containers"][0]
    timeouts = [arg for arg in engine["args"] if arg.startswith("--shutdown-timeout")]
    pre_stop = engine.get("lifecycle", {}).get("preStop")
    return timeouts, pre_stop, rendered["terminationGracePeriodSeconds"]


SLEEP, DRAIN = {"sleep": {"seconds": 5}}, {"exec": {"command": ["drain"]}}
CONTAINERS = {"containers": [{"name": "engine", "lifecycle": {"preStop": DRAIN}}]}
TIMEOUT, GRACE = "--shutdown-timeout", "terminationGracePeriodSeconds"


@pytest.mark.parametrize(
    ("args", "spec", "expected"),
    [
        ([], {}, ([f"{TIMEOUT}=60"], SLEEP, 120)),
        ([f"{TIMEOUT}=300"], {}, ([f"{TIMEOUT}=300"], SLEEP, 360)),
        ([TIMEOUT, "9"], {}, ([TIMEOUT], SLEEP, 69)),
        ([], {GRACE: 300}, ([f"{TIMEOUT}=240"], SLEEP, 300)),
        ([], {GRACE: 30}, ([f"{TIMEOUT}=0"], SLEEP, 30)),
        # The API server refuses a sleep that is not shorter than the grace period, and a second handler.
        ([], {GRACE: 5}, ([f"{TIMEOUT}=0"], None, 5)),
        ([], CONTAINERS, ([f"{TIMEOUT}=60"], DRAIN, 120)),
        ([f"{TIMEOUT}=70"], CONTAINERS | {GRACE: 90}, ([f"{TIMEOUT}=70"], DRAIN, 90)),
    ],
)
def test_terminating_pod_has_time_for_requests_and_queued_writes(args, spec, expected):
    assert termination_of(args, spec) == expected


@pytest.mark.parametrize(
    ("grace", "expected"),
    [
        ({}, ("10", "60", 127, {"sleep": {"seconds": 2}})),
        ({GRACE: 300}, ("10", "233", 300, {"sleep": {"seconds": 2}})),
        ({GRACE: 12}, ("0", "0", 12, None)),
        (CONTAINERS, ("10", "60", 127, DRAIN)),
    ],
)
def test_all_pods_of_an_engine_serve_until_clients_know_of_a_drain(grace, expected) -> None:
    """The launchers wait. The pod that terminates begins when its launcher surely handles SIGTERM."""
    spec = pod_of(engine={"nodes": 2, "parallelism": {"data": 2}, "podTemplate": {"spec": grace}})
    (engine,) = spec["containers"]
    env = env_of(engine)
    (timeout,) = (arg.partition("=")[2] for arg in engine["args"] if arg.startswith(TIMEOUT))
    pre_stop = engine.get("lifecycle", {}).get("preStop")
    assert (env["LMCACHE_GROUP_NOTICE_SECONDS"], timeout, spec[GRACE], pre_stop) == expected
    assert env["LMCACHE_GROUP_SHUTDOWN_SECONDS"] == timeout
    assert env["LMCACHE_GROUP_READY_PORT"] == f"{engine['readinessProbe']['tcpSocket']['port']}"


def test_failed_liveness_probe_has_a_shorter_grace_period() -> None:
    def graces(**spec: Any) -> dict[str, Any]:
        pod = pod_of(engine={"podTemplate": {"spec": spec}})
        probes = {c["name"]: c.get("livenessProbe", {}) for c in pod["initContainers"] + pod["containers"]}
        return {name: probe.get("terminationGracePeriodSeconds") for name, probe in probes.items()}

    engine = {"name": "engine", "livenessProbe": {"terminationGracePeriodSeconds": 30}}
    sidecar = {"name": "sidecar", "livenessProbe": {"terminationGracePeriodSeconds": None}}
    assert graces() == {"sidecar": 10, "payload": None, "engine": 10}
    assert graces(containers=[engine]) == {"sidecar": 10, "payload": None, "engine": 30}
    assert graces(initContainers=[sidecar]) == {"sidecar": None, "payload": None, "engine": 10}
