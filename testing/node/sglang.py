"""SGLang engines as pods on a node, with the tiny model and the stand-ins for CUDA."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from testing.kube.api import Object
from testing.node import app
from testing.node.cluster import NodeCluster
from testing.node.pods import ENGINE_PORT, Pod
from testing.sglang import environment

PAGE_TOKENS = 64
_MODULES, _COMPILED = "modules", "sglang-modules"
"""Volume of compiled modules, and the claim from which each pod copies them: SGLang locks their folder."""
ARGS = (
    "--served-model-name=tiny", "--device=cpu", "--dtype=float32", "--attention-backend=torch_native",
    "--sampling-backend=pytorch", "--cuda-graph-backend-decode=disabled",
    "--cuda-graph-backend-prefill=disabled", "--disable-overlap-schedule", "--sleep-on-idle",
    "--max-total-tokens=16384", "--max-running-requests=8", "--mem-fraction-static=0.6",
)  # fmt: skip
"""Arguments of the engine, in addition to those of the operator."""


def prepare(node: NodeCluster) -> None:
    """Create the claims of SGLang's folders. The packages must be installed: a node has no network."""
    for name, path in {**_folders(), _COMPILED: environment.extensions()}.items():
        app.create_claim(node, name, path)


def cluster(name: str, image: str, **tiers: Any) -> Object:
    """An LMCacheCluster with one SGLang; otherwise like `app.tiny_cluster`."""
    engine = {"kind": "SGLang", "image": image, "args": list(ARGS), "podTemplate": {"spec": pod(image)}}
    return app.cluster(name, engine, **tiers)


def pod(image: str) -> Object:
    """The spec of a pod template with SGLang's folders and variables."""
    folders = _folders()
    variables = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "SGLANG_FOLDERS": ":".join(str(folders[name]) for name in ("sglang-cpu", "sglang")),
        "TORCHDYNAMO_DISABLE": "1",  # otherwise the first prompt compiles for seconds
        "TORCH_EXTENSIONS_DIR": str(environment.extensions()),
        "TRANSFORMERS_OFFLINE": "1",
    }
    spec = app.engine_pod({**app.HOST_DIRECTORIES, **folders}, variables)
    copying = {
        "name": "modules",
        "image": image,
        "command": ["sh", "-c", "cp -r --preserve=timestamps /compiled/* /copies"],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": _COMPILED, "mountPath": "/compiled", "readOnly": True},
            {"name": _MODULES, "mountPath": "/copies"},
        ],
    }
    (engine,) = spec["containers"]
    engine["volumeMounts"].append({"name": _MODULES, "mountPath": str(environment.extensions())})
    claim = {"persistentVolumeClaim": {"claimName": _COMPILED, "readOnly": True}}
    volumes = [*spec["volumes"], {"name": _MODULES, "emptyDir": {}}, {"name": _COMPILED, **claim}]
    return {**spec, "initContainers": [copying], "volumes": volumes}


def num_cached(pod: Pod, prompt: list[int]) -> dict[str, int]:
    """Run a prompt. Returns the number of its cached tokens by tier: ``device``, ``host`` and ``storage``."""
    sampling = {"max_new_tokens": 1, "temperature": 0}
    answer = json.loads(_post(pod, "/generate", {"input_ids": prompt, "sampling_params": sampling}))
    cached = answer["meta_info"]["cached_tokens_details"] or {}  # empty if all tokens were computed
    return {tier: cached.get(tier, 0) for tier in ("device", "host", "storage")}


def flush_cache(pod: Pod) -> None:
    """Empty SGLang's own caches, in the device and in the host pool. SGLang first stores their pages."""
    _post(pod, "/flush_cache?timeout=60", {})


def _folders() -> dict[str, Path]:
    return {"sglang": environment.package(), "sglang-cpu": environment.CPU}


def _post(pod: Pod, path: str, body: Object) -> bytes:
    url = f"http://{pod.address}:{ENGINE_PORT}{path}"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        content: bytes = answer.read()
    return content
