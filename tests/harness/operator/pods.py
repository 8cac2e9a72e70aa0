"""Requests and observations of tests on a node, in addition to `testing.node.pods`."""

import contextlib
import random

from lmcache_operator.pods.resize import sidecar_memory
from lmcache_operator.specs.names import MEMORY_SIZE
from testing.kube.api import ApiError
from testing.node import groups
from testing.node.app import NAMESPACE, App
from testing.node.pods import SIDECAR_PORT, Pod

_CHUNK = 256


def prompt(seed: int, length: int = 4096) -> list[int]:
    numbers = random.Random(seed)
    return [4 + numbers.randrange(256) for _ in range(length)]


def least_cached(question: list[int]) -> int:
    """Tokens of all chunks except the last: an engine computes at least the last token again."""
    return (len(question) // _CHUNK - 1) * _CHUNK


def hit(pod, question: list[int], cold):
    """Repeat ``question`` until its whole prompt is cached, and return that answer. All answers must have the
    tokens of ``cold``, the answer without a cache.

    A request waits for chunks of a lower tier only while that is faster than computing. On a busy machine the
    next request finds the rest.
    """

    def ask():
        answer = pod.complete(question)
        pod.reset_engine_cache()
        assert answer.tokens == cold.tokens
        return answer if answer.num_cached >= least_cached(question) else None

    pod.reset_engine_cache()
    return pod.node.wait(ask, 180)


def is_terminating(pod) -> bool:
    """Whether the pod has a deletion timestamp."""
    return "deletionTimestamp" in pod.object["metadata"]


@contextlib.contextmanager
def retained(*pods):
    """Retain the pods' objects after their end until the block ends, for their container states."""
    patch = {"metadata": {"finalizers": ["lmcache.test/kept"]}}
    for pod in pods:
        pod.node.api.patch("v1/pods", pod.name, patch, pod.namespace)
    try:
        yield
    finally:
        for pod in pods:
            with contextlib.suppress(ApiError):  # the object is already deleted
                pod.node.api.patch("v1/pods", pod.name, {"metadata": {"finalizers": None}}, pod.namespace)


def termination_states(pod):
    """Termination states of engine and sidecar, once both have ended."""
    ended = [pod.container(name)["state"].get("terminated") for name in ("engine", "sidecar")]
    return ended if all(ended) else None


def is_in_service(app) -> bool:
    """Whether clients of the Service reach the engine."""
    slices = app.node.api.objects(
        "discovery.k8s.io/v1/endpointslices", NAMESPACE, f"kubernetes.io/service-name={app.name}"
    )
    return any(e["conditions"].get("ready") for item in slices for e in item.get("endpoints") or [])


def is_ready(pod) -> bool:
    """Whether the sidecar answers that it is ready."""
    with contextlib.suppress(OSError):
        return bool(pod.get(SIDECAR_PORT, "/readyz"))
    return False


def stats_after_restart(pod, former: int):
    """Statistics of the sidecar once its process is not ``former`` any more. Meanwhile its parent answers."""
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
    """Whether annotation, request, cgroup and sidecar have this size."""
    pod = app.pod()
    memory = pod.stats()["memory"]
    mebibytes = sidecar_memory(num_bytes) >> 20
    return (
        pod.object["metadata"]["annotations"][MEMORY_SIZE] == str(num_bytes)
        and memory["target_bytes"] == memory["size_bytes"] == num_bytes
        and sidecar_limit(pod) == f"{mebibytes}Mi"
        and groups.memory_limit(pod.group("sidecar")) == mebibytes << 20
    )
