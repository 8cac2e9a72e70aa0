"""What tests on a node ask and look at beside `testing.node.pods`."""

from __future__ import annotations

import contextlib
import random

from lmcache_operator.components.resize import sidecar_memory
from lmcache_operator.specs.names import MEMORY_SIZE

from testing.kube.api import ApiError
from testing.node import groups
from testing.node.app import NAMESPACE, App
from testing.node.pods import ENGINE_PORT, SIDECAR_PORT, Pod

_CHUNK = 256


def prompt(seed: int, length: int = 4096) -> list[int]:
    numbers = random.Random(seed)
    return [4 + numbers.randrange(256) for _ in range(length)]


def least_cached(question: list[int]) -> int:
    """All chunks but the last, of which an engine computes at least the last token anew."""
    return (len(question) // _CHUNK - 1) * _CHUNK


def hit(pod, question: list[int], cold):
    """The first answer to ``question`` whose prompt was cached whole, as from a user who asks again; all have
    the tokens of ``cold``, the answer without a cache.

    What a lower tier has comes while the request waits for it, as long as that is worth it; a machine that
    is busy brings the rest for the next one.
    """

    def ask():
        answer = pod.complete(question)
        pod.reset_engine_cache()
        assert answer.tokens == cold.tokens
        return answer if answer.num_cached >= least_cached(question) else None

    pod.reset_engine_cache()
    return pod.node.wait(ask, 180)


def num_running(pod) -> float:
    """Requests that the engine works on."""
    lines = pod.get(ENGINE_PORT, "/metrics").decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))


def is_going(pod) -> bool:
    """Whether its end has begun."""
    return "deletionTimestamp" in pod.object["metadata"]


@contextlib.contextmanager
def kept(*pods):
    """Their objects stay when they have ended, until the end of the block: with how their containers did."""
    patch = {"metadata": {"finalizers": ["lmcache.test/kept"]}}
    for pod in pods:
        pod.node.api.patch("v1/pods", pod.name, patch, pod.namespace)
    try:
        yield
    finally:
        for pod in pods:
            with contextlib.suppress(ApiError):  # it went already: there was none left to keep
                pod.node.api.patch("v1/pods", pod.name, {"metadata": {"finalizers": None}}, pod.namespace)


def endings(pod):
    """How the engine and the sidecar of a pod ended, when both have."""
    ended = [pod.container(name)["state"].get("terminated") for name in ("engine", "sidecar")]
    return ended if all(ended) else None


def is_in_service(app) -> bool:
    """Whether a client of the Service reaches the engine."""
    slices = app.node.api.objects(
        "discovery.k8s.io/v1/endpointslices", NAMESPACE, f"kubernetes.io/service-name={app.name}"
    )
    return any(e["conditions"].get("ready") for found in slices for e in found.get("endpoints") or [])


def is_ready(pod) -> bool:
    """Whether the sidecar answers and says so."""
    with contextlib.suppress(OSError):
        return bool(pod.get(SIDECAR_PORT, "/readyz"))
    return False


def started_again(pod, former: int):
    """The figures of the sidecar's process when it is another one than ``former``; while there is none, its
    parent answers."""
    with contextlib.suppress(OSError):
        stats = pod.stats()
        return stats if stats.get("pid", former) != former else None
    return None


def no_restart_between(before, after) -> bool:
    return all(
        before.container(name)["restartCount"] == after.container(name)["restartCount"]
        for name in ("sidecar", "engine")
    )


def sidecar_limit(pod: Pod) -> str:
    (sidecar,) = (c for c in pod.object["spec"]["initContainers"] if c["name"] == "sidecar")
    return str(sidecar["resources"]["limits"]["memory"])


def has_size(app: App, num_bytes: int) -> bool:
    """Whether annotation, request, cgroup and sidecar have it."""
    pod = app.pod()
    memory = pod.stats()["memory"]
    mebibytes = sidecar_memory(num_bytes) >> 20
    return (
        pod.object["metadata"]["annotations"][MEMORY_SIZE] == str(num_bytes)
        and memory["target_bytes"] == memory["size_bytes"] == num_bytes
        and sidecar_limit(pod) == f"{mebibytes}Mi"
        and groups.memory_limit(pod.group("sidecar")) == mebibytes << 20
    )
