"""The state of an engine pod in a few words, before its sidecar answers. Pure."""

from __future__ import annotations

import re

from lmcache_operator.pods.pods import condition_of, is_ready
from lmcache_operator.specs import Object
from lmcache_store.common.text import plain

_NORMAL_WAITS = ("ContainerCreating", "PodInitializing", "")
_UNREACHED = re.compile(r"^error trying to reach service: (dial tcp \S+ )?(connect: )?")
"""Beginning of an answer of the API server's proxy for a pod where nothing listens."""


def failure_of_pod(pod: Object) -> str:
    """Return why a pod cannot start, in the words of kubectl; empty: nothing in it has failed."""
    status = pod.get("status") or {}
    if status.get("phase") == "Failed":
        return plain(status.get("reason")) or "Failed"
    if condition_of(pod, "PodScheduled").get("status") == "False":
        return plain(condition_of(pod, "PodScheduled").get("reason"))
    for container in [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]:
        name, state = container.get("name"), container.get("state") or {}
        waiting = plain((state.get("waiting") or {}).get("reason"))
        if waiting not in _NORMAL_WAITS:
            return f"container {name}: {waiting}"
        ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated") or {}
        if ended.get("exitCode") and not container.get("ready"):
            return f"container {name} ended with exit code {ended['exitCode']}"
    return ""


def is_starting(pod: Object) -> bool:
    """Whether a pod is not ready yet, and nothing in it has failed."""
    status = pod.get("status") or {}
    has_started = [each.get("started") for each in status.get("containerStatuses") or ()]
    is_over = is_ready(pod) or "deletionTimestamp" in pod["metadata"] or status.get("phase") == "Succeeded"
    return not (is_over or (has_started and all(has_started)) or failure_of_pod(pod))


def reason_of_silence(problem: str) -> str:
    """Return why a sidecar does not answer, without the addresses that the API server's proxy names."""
    return _UNREACHED.sub("the sidecar does not answer: ", problem)
