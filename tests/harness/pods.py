"""What tests on a node ask and look at beside `testing.node.pods`."""

from __future__ import annotations

import contextlib
import random

from testing.node.app import NAMESPACE
from testing.node.pods import SIDECAR_PORT


def prompt(seed: int, length: int = 4096) -> list[int]:
    numbers = random.Random(seed)
    return [4 + numbers.randrange(256) for _ in range(length)]


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
    """The figures of the sidecar's process when it is another one than ``former``."""
    with contextlib.suppress(OSError):
        stats = pod.stats()
        return stats if stats["pid"] != former else None
    return None


def no_restart_between(before, after) -> bool:
    return all(
        before.container(name)["restartCount"] == after.container(name)["restartCount"]
        for name in ("sidecar", "engine")
    )
