"""Mode Auto chooses the memory of a serving pod, and a real kubelet grants it without a restart.

The operator runs in its pod as installed, except that its autoscaler's clock runs an hour in a minute.
"""

import random
import threading
import time
from collections.abc import Iterator

import pytest

from lmcache_operator.policy.report import restore
from testing.child_process import REPOSITORY
from testing.kube.api import Object
from testing.kube.operator import CLUSTERS, SYSTEM_NAMESPACE
from testing.node.app import NAMESPACE, OPERATOR, App, create_claim
from testing.node.cluster import NodeCluster
from testing.node.pods import Pod
from tests.harness.operator.pods import has_size, no_restart_between, prompt

FACTOR = 60
SECONDS = 300
MIB = 1 << 20
PROMPTS = [prompt(100 + number, 1100) for number in range(34)]
"""Prompts of four chunks of 1 MiB, in random order: a tier with a share of the 136 MiB hits that share."""
ENGINE_ARGS = {"--kv-cache-memory-bytes": f"{20 * MIB}", "--max-model-len": "4096"}
"""The engine's own cache holds less than the smallest memory tier."""


@pytest.fixture(scope="module")
def accelerated(installed) -> Iterator[NodeCluster]:
    """The node, with an operator whose clock runs an hour in a minute."""
    create_claim(installed, "testing", REPOSITORY / "testing", SYSTEM_NAMESPACE)
    program = ["/opt/lmcache/venv/bin/python", "-m", "testing.kube.fast_operator"]
    operator = {
        "name": "operator",
        "command": [*program, f"{time.time():.0f}", f"{FACTOR}", "1"],
        "env": [{"name": "PYTHONPATH", "value": "/opt/lmcache/project:/opt/more"}],
        "volumeMounts": [{"name": "testing", "mountPath": "/opt/more/testing", "readOnly": True}],
    }
    volume = {"name": "testing", "persistentVolumeClaim": {"claimName": "testing", "readOnly": True}}
    patch = {"spec": {"template": {"spec": {"containers": [operator], "volumes": [volume]}}}}
    path = installed.api.path("apps/v1/deployments", SYSTEM_NAMESPACE, OPERATOR)
    installed.api.request("PATCH", path, patch, "application/strategic-merge-patch+json")
    rollout(installed, "status", "--timeout=300s")
    yield installed
    rollout(installed, "undo")
    rollout(installed, "status", "--timeout=300s")


def rollout(node: NodeCluster, action: str, *flags: str) -> None:
    node.kubectl("rollout", action, f"deployment/{OPERATOR}", "-n", SYSTEM_NAMESPACE, *flags)


@pytest.fixture
def app(accelerated, make_app) -> Iterator[App]:
    app = make_app("sized", memory={"size": "64Mi"})
    spec = app.spec["spec"]
    del spec["tiers"]["remote"]
    flags = dict(flag.partition("=")[::2] for flag in spec["engine"]["args"]) | ENGINE_ARGS
    spec["engine"]["args"] = [f"{name}={value}" if value else name for name, value in flags.items()]
    spec["autoscaling"] = {"mode": "Auto", "memory": {"minSize": "64Mi", "maxSize": "1Gi"}}
    app.apply()
    yield app
    app.delete()


@pytest.fixture
def answered(app) -> Iterator[list[int]]:
    """Numbers of the answered prompts. A thread sends requests one after the other until the test ends."""
    pod, stop, rng, numbers = app.ready_pod(), threading.Event(), random.Random(5), list[int]()

    def ask() -> None:
        while not stop.is_set():
            number = rng.randrange(len(PROMPTS))
            pod.complete(PROMPTS[number], 1)
            numbers.append(number)

    requests = threading.Thread(target=ask)
    requests.start()
    yield numbers
    stop.set()
    requests.join()


def memory_status(app: App) -> Object:
    """The autoscaling status of the memory tier."""
    cluster = app.node.api.get(CLUSTERS, app.name, NAMESPACE)
    status: Object = cluster.get("status", {}).get("autoscaling", {}).get("memory", {})
    return status


def chosen_bytes(app: App) -> int | None:
    """The chosen size, from the ConfigMap."""
    data = app.node.api.get("v1/configmaps", f"{app.name}-autoscaling", NAMESPACE)["data"]
    return choice.size if (choice := restore(data).memory) else None


def hit_ratio(app: App, pod: Pod, answered: list[int]) -> float:
    """Share of the tokens of the next requests that are found in memory or in the engine."""

    def token_counts() -> tuple[int, int]:
        lookups = pod.stats()["lookups"]
        return lookups["lookup_tokens"], sum(lookups["hit_tokens"].values())

    counts_before, start = token_counts(), len(answered)
    app.node.wait(lambda: len(answered) >= start + 2 * len(PROMPTS), SECONDS)
    looked_up, hit = (after - before for after, before in zip(token_counts(), counts_before, strict=True))
    return hit / looked_up


def applied_bytes(app: App) -> int | None:
    """The chosen size, once it is at least 128 MiB and the pod has it."""
    size = chosen_bytes(app)
    return size if size and size >= 128 * MIB and has_size(app, size) else None


def test_memory_grows_to_the_best_size_and_shrinks_when_auto_ends(app, answered):
    before = app.ready_pod()
    size = app.node.wait(lambda: applied_bytes(app), SECONDS)
    assert size <= 256 * MIB
    app.node.wait(lambda: memory_status(app).get("current") not in (None, "64Mi"), SECONDS)
    events = app.node.api.objects("v1/events", NAMESPACE)
    reasons = [e["message"] for e in events if e["reason"] == "SizeChosen" and app.name in str(e)]
    assert any("per pod instead of 64Mi:" in reason for reason in reasons), reasons
    hit_ratio(app, before, answered)  # the larger tier fills
    assert hit_ratio(app, before, answered) > 0.75
    (smallest, *_) = memory_status(app)["curve"]
    assert smallest["size"] == "64Mi"
    assert float(smallest["hit"]) < 0.6

    app.spec["spec"]["autoscaling"]["mode"] = "Recommend"
    app.apply()
    app.node.wait(lambda: has_size(app, 64 * MIB), SECONDS)
    after = app.ready_pod()
    assert after.uid == before.uid
    assert no_restart_between(before, after)
