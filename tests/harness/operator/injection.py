"""Users' pods for the command line and the API server: some can have a cache, and some cannot."""

from operator import itemgetter
from typing import Any

from hypothesis import strategies as st

from lmcache_operator.components.injection.workloads import Injected, inject_objects
from lmcache_operator.contract.base import Context
from lmcache_operator.specs.names import INJECT_LABEL, STOCK_IMAGES
from tests.harness.operator.model import cluster

NAME = "demo"
CONTEXT = Context(STOCK_IMAGES)


def pod(*, name: str = NAME, **changes: Any) -> dict[str, Any]:
    """A pod with one engine, labelled with a cluster. ``changes`` replace fields of the engine."""
    engine = {"name": "vllm", "image": "vllm/vllm-openai:v0.32.0", "args": ["Qwen/Qwen3-8B", "--port=80"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "llm", "labels": {"app": "llm", INJECT_LABEL: name}},
        "spec": {"containers": [engine | changes]},
    }


SGLANG = ["python3", "-m", "sglang.launch_server"]


def sglang_pod(*args: str, **changes: Any) -> dict[str, Any]:
    """The same pod with SGLang as its engine."""
    words = ["--model-path=Qwen/Qwen3-8B", *args]
    return pod(**{"image": "lmsysorg/sglang:v0.5.23", "command": SGLANG, "args": words} | changes)


def pod_with(metadata: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """The same pod with changed fields of the pod."""
    manifest = pod()
    return manifest | {"metadata": manifest["metadata"] | (metadata or {}), "spec": manifest["spec"] | spec}


def deployment(**spec: Any) -> dict[str, Any]:
    """A Deployment of these pods."""
    manifest = pod_with(**spec)
    template = {"metadata": {"labels": manifest["metadata"]["labels"]}, "spec": manifest["spec"]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "llm"},
        "spec": {"selector": {"matchLabels": {"app": "llm"}}, "template": template},
    }


_PROXY = {"name": "proxy", "image": "proxy:1"}
_SHELL = (
    "a shell does not pass arguments on: write command: [vllm, serve] or [sglang, serve], and args as a list"
)
_GROUP = {"labels": {INJECT_LABEL: NAME, "leaderworkerset.sigs.k8s.io/name": "x"}}
_OPTIONS = {
    "--kv-transfer-config can't be set: it loads LMCache": (
        "--kv-transfer-config={} --kv_transfer_config --kv-transfer-config.kv_role=kv_both --kv-t"
    ),
    "chunk keys must be the same in every pod": "--prefix-caching-hash-algo=sha256",
    "the keys of cached chunks are made": "--no-enable-prefix-caching",
    "it would replace LMCache": "--kv-offloading-size=5",
    "for more engines run more pods": (
        "--data-parallel-size-local=2 -dpl --nnodes -n2 -n+2 --node_rank=1 -r1 -pcp -pc --headless -dpn"
        " --data_parallel_rank=1 --data-parallel --data-parallel-hybrid-lb --data-parallel-backend=ray"
        " --data-parallel-addr=h"
    ),
    "--enable-elastic-ep can't be set: it changes the number of ranks": "--enable-elastic-ep --enable-el",
    "a file may hold options that can't be set": "--config=/x.yaml",
    "can't be ray or external_launcher": "--distributed-executor-backend=ray --dist=external_launcher",
    "what follows it would be taken for a second model": "--",
}
"""Messages, and the options of vLLM that they refuse."""
_SGLANG_OPTIONS = {
    "it loads LMCache, and HiCache has only one storage backend": "--hicache-storage-backend=file",
    "it loads LMCache, and names the socket of the sidecar": "--hicache-storage-backend-extra-config={}",
    "--hicache-storage-backend-extra-config can't be set": "--hicache-storage-backend-e",
    "LMCache copies whole pages": "--hicache-mem-layout=layer_first",
    "without the radix cache, the engine has no prefixes to store": "--disable-radix-cache",
    "--disable-radix-cache can't be set": "--disable-radix",
    "it would replace HiCache": "--enable-lmcache",
    "for more engines run more pods": (
        "--attn-dp-size=2 --enable-dp-attention --dwdp-size=2 --nnodes --elastic-ep-backend=nixl"
    ),
    "the engine would run without its cache": "--dcp-size=2",
    "to split prefill and decode over pods, set spec.engine.prefill": "--disaggregation-mode=prefill",
    "a file may hold options that can't be set": "--config=/x.yaml",
    "what follows it would not be read as options": "--",
}


def _each(options: dict[str, str]) -> list[tuple[str, str]]:
    return [(option, message) for message, words in options.items() for option in words.split()]


def refused_pods() -> list[tuple[dict[str, Any], str, str]]:
    """Pods that cannot have a cache, each with the path of the problem and a part of the message."""
    spec, engine = "spec", "spec.containers[0]"
    volume, (vllm,) = {"name": "lmcache-x", "emptyDir": {}}, pod()["spec"]["containers"]
    mounted = vllm | {"volumeMounts": [{"name": "run", "mountPath": "/run/lmcache"}]}
    two_mounts = pod_with(containers=[mounted], volumes=[volume | {"name": "run"}])
    memory = pod_with(resources={"limits": {"memory": "1Gi"}})
    nameless = pod_with({"annotations": {"lmcache.io/container": ""}})
    variables = {"PYTHONPATH": "/opt/lmcache/client", "PYTHONHASHSEED": "0"}
    return [
        (pod_with(_GROUP), spec, "an engine of several pods gets no"),
        (pod_with(hostNetwork=True), f"{spec}.hostNetwork", "each sidecar needs port 9464"),
        (memory, f"{spec}.resources", "set resources for each cont"),
        (pod_with(volumes=[volume]), spec, "begin with lmcache- are reserved for the cache"),
        (pod_with(initContainers=[_PROXY | {"name": "lmcache-x"}]), spec, "begin with lmcache- are reserved"),
        (pod(ports=[{"containerPort": 9464}]), f"{spec}.containers", "port 9464 is reserved for the sidecar"),
        (pod_with(containers=[_PROXY, vllm]), f"{spec}.containers", "must name the engine container"),
        (nameless, f"{spec}.containers", "must name the engine container"),
        (pod(args=[]), f"{engine}.args", "the image's own arguments would be lost: set command or args"),
        (pod(command=["/bin/sh", "-c"], args=["vllm serve x"]), f"{engine}.command", _SHELL),
        (pod(command=["bash", "-c", "exec vllm serve x"], args=[]), f"{engine}.command", _SHELL),
        (pod(command=["/opt/start-vllm.sh"]), f"{engine}.command", _SHELL),
        (pod(args=["vllm serve x | tee log"]), f"{engine}.command", _SHELL),
        (pod(args=["x", "--distributed-executor-backend", "ray"]), f"{engine}.args", "can't be ray or"),
        (pod(env=[{"name": "VLLM_DP_RANK", "value": "0"}]), f"{engine}.env", "VLLM_DP_RANK can't be set"),
        (pod(command=["bash", "-c", "sglang serve x"]), f"{engine}.command", _SHELL),
        (pod(args=["python3 -m sglang.launch_server --x"]), f"{engine}.command", _SHELL),
        (pod(command=["python3", "-m", "x"]), f"{engine}.command", "starts neither vLLM nor SGLang"),
        *((sglang_pod(option), f"{engine}.args", text) for option, text in _each(_SGLANG_OPTIONS)),
        *((pod(args=["x", option]), f"{engine}.args", text) for option, text in _each(_OPTIONS)),
        *(
            (
                pod(env=[{"name": name, "value": "x"}]),
                f"{engine}.env",
                f"{name} must be {value}, or not be set",
            )
            for name, value in variables.items()
        ),
        (two_mounts, f"{engine}.volumeMounts", "/run/lmcache is reserved for the cache"),
    ]


_NAMES = st.sampled_from(["a", "b", "config", "lmcache-x"])
_WORDS = st.sampled_from([
    "Qwen/Qwen3-8B", "vllm", "serve", "python3", "/usr/bin/vllm", "--max-model-len=9", "--port", "shell",
    "--kv-t", "--kv_transfer_config=x", "--data-parallel-size.x", "--data-parallel", "--model-impl",
    "-dc={}", "-dp=2", "-dpx", "-dpa", "--data_parallel_size=2", "--data-parallel-size-l",
    "--", "-", "", "-n", "-nope", "-n+2", "-pc", "--dist", "ray", "tini", "sh", "x.sh", "/bin/bash", "$(A)",
    "sglang", "/opt/bin/sglang", "sglang.launch_server", "--page", "--hicache-ratio=2", "--disable-radix",
    "--hicache-storage-backend", "--served-model-name",
])  # fmt: skip
_VARIABLES = st.sampled_from([
    {"name": "A", "value": "b"}, {"name": "B"}, {"name": "PYTHONHASHSEED", "value": "0"},
    {"name": "PYTHONPATH"}, {"name": "VLLM_DP_SIZE", "value": "2"},
    {"name": "LMCACHE_SOCKET", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
])  # fmt: skip
_USER = st.fixed_dictionaries({}, optional={
    "runAsUser": st.integers(1, 9), "runAsGroup": st.integers(1, 9), "runAsNonRoot": st.booleans(),
    "readOnlyRootFilesystem": st.booleans(),
})  # fmt: skip
_PATHS = st.sampled_from(["/a", "/models", "/run/lmcache", "/dev/shm"])


@st.composite
def pods(draw: st.DrawFn) -> dict[str, Any]:
    """Valid pods of users. A third of them can have a cache."""
    volumes = draw(st.lists(_NAMES, max_size=2, unique=True))
    mounts = draw(st.lists(_PATHS, max_size=2 if volumes else 0, unique=True))
    engine = {
        "volumeMounts": [{"name": volumes[0], "mountPath": path} for path in mounts],
        **draw(st.fixed_dictionaries({}, optional={
            "image": st.sampled_from(["lmsysorg/sglang:v0.5.23", "a/sglang-router", "sglang@sha256:0"]),
            "command": st.sampled_from([["vllm", "serve"], SGLANG, ["sglang", "serve"]])
            | st.lists(_WORDS, max_size=2),
            "args": st.just(["Qwen/Qwen3-8B"]) | st.lists(_WORDS, max_size=4),
            "env": st.lists(_VARIABLES, max_size=2, unique_by=itemgetter("name")),
            "ports": st.sampled_from([[{"containerPort": 80}], [{"containerPort": 9464}]]),
            "securityContext": _USER,
            "resources": st.just({"claims": [{"name": "gpu"}], "requests": {"cpu": "1"}}),
        })),
    }  # fmt: skip
    other_names = draw(st.lists(_NAMES, max_size=2, unique=True))
    split = draw(st.integers(0, len(other_names)))
    containers = [{"name": name, "image": "other:1"} for name in other_names]
    chosen = draw(st.fixed_dictionaries({}, optional={"lmcache.io/container": _NAMES | st.just("vllm")}))
    labels = st.sampled_from([pod()["metadata"], pod()["metadata"], _GROUP]).map(lambda obj: obj["labels"])
    return pod_with(
        draw(st.fixed_dictionaries({"labels": labels}, optional={"annotations": st.just(chosen)})),
        containers=[*containers[:split], *pod(**engine)["spec"]["containers"]],
        initContainers=containers[split:],
        volumes=[{"name": name, "emptyDir": {}} for name in volumes],
        resourceClaims=[{"name": "gpu", "resourceClaimName": "gpu"}],
        automountServiceAccountToken=False,
        **draw(st.fixed_dictionaries({}, optional={
            "securityContext": st.fixed_dictionaries({}, optional={
                "supplementalGroups": st.sampled_from([[], [1], [2000]]), "runAsUser": st.integers(1, 9),
            }),
            "hostNetwork": st.just(False),
        })),
    )  # fmt: skip


def outcome(*objects: Any, name: str | None = None, **changes: Any) -> Injected:
    """The result of injection into these objects with one LMCacheCluster."""
    return inject_objects(objects, [cluster(**changes)], name, CONTEXT)


def injected(*objects: Any, name: str | None = None, **changes: Any) -> list[Any]:
    return outcome(*objects, name=name, **changes).objects
