"""Auto chooses what memory a pod has while it serves, and a real kubelet gives it: nothing is restarted.

The operator is in its pod as installed, but for its autoscaler's clock, which runs an hour in a minute.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest
from lmcache_operator.autoscaling.report import restore

from testing.child_process import REPOSITORY
from testing.kube.api import Object
from testing.kube.operator import CLUSTERS, SYSTEM_NAMESPACE
from testing.node.app import NAMESPACE, OPERATOR, App, offer
from testing.node.cluster import NodeCluster
from testing.node.pods import Pod
from tests.harness.pods import has_size, no_restart_between, prompt

FACTOR = 60
SECONDS = 300
MIB = 1 << 20
PROMPTS = [prompt(100 + number, 1100) for number in range(34)]
"""Four chunks each of a MiB, by chance: of 136 MiB together a tier hits its share."""
ENGINE_ARGS = {"--kv-cache-memory-bytes": f"{20 * MIB}", "--max-model-len": "4096"}
"""The engine's own cache holds less than the smallest memory does."""


@pytest.fixture(scope="module")
def hurried(installed) -> Iterator[NodeCluster]:
    """The node, with an operator to whom an hour is a minute."""
    offer(installed, "testing", REPOSITORY / "testing", SYSTEM_NAMESPACE)
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
    roll(installed, "status", "--timeout=300s")
    yield installed
    roll(installed, "undo")
    roll(installed, "status", "--timeout=300s")


def roll(node: NodeCluster, what: str, *flags: str) -> None:
    node.kubectl("rollout", what, f"deployment/{OPERATOR}", "-n", SYSTEM_NAMESPACE, *flags)


@pytest.fixture
def app(hurried, make_app) -> Iterator[App]:
    app = make_app("sized", memory={"size": "64Mi"})
    spec = app.spec["spec"]
    del spec["tiers"]["remote"]
    given = dict(flag.partition("=")[::2] for flag in spec["engine"]["args"]) | ENGINE_ARGS
    spec["engine"]["args"] = [f"{name}={value}" if value else name for name, value in given.items()]
    spec["autoscaling"] = {"mode": "Auto", "memory": {"minSize": "64Mi", "maxSize": "1Gi"}}
    app.apply()
    yield app
    app.delete()


@pytest.fixture
def asked(app) -> Iterator[list[int]]:
    """The numbers of requests that were answered, one after the other, until the end of the test."""
    pod, stop, chance, numbers = app.ready_pod(), threading.Event(), random.Random(5), list[int]()

    def ask() -> None:
        while not stop.is_set():
            number = chance.randrange(len(PROMPTS))
            pod.complete(PROMPTS[number], 1)
            numbers.append(number)

    requests = threading.Thread(target=ask)
    requests.start()
    yield numbers
    stop.set()
    requests.join()


def told(app: App) -> Object:
    """What the status says of the memory tier's size."""
    cluster = app.node.api.get(CLUSTERS, app.name, NAMESPACE)
    found: Object = cluster.get("status", {}).get("autoscaling", {}).get("memory", {})
    return found


def chosen(app: App) -> int | None:
    """Bytes, by the ConfigMap."""
    data = app.node.api.get("v1/configmaps", f"{app.name}-autoscaling", NAMESPACE)["data"]
    return choice.size if (choice := restore(data).memory) else None


def hits(app: App, pod: Pod, asked: list[int]) -> float:
    """The share of the tokens of some requests that was found in memory or in the engine."""

    def counted() -> tuple[int, int]:
        lookups = pod.stats()["lookups"]
        return lookups["lookup_tokens"], sum(lookups["hit_tokens"].values())

    before, start = counted(), len(asked)
    app.node.wait(lambda: len(asked) >= start + 2 * len(PROMPTS), SECONDS)
    looked_up, found = (after - former for after, former in zip(counted(), before, strict=True))
    return found / looked_up


def reached(app: App) -> int | None:
    """The size that was chosen, if it is much and the pod has it: bytes."""
    size = chosen(app)
    return size if size and size >= 128 * MIB and has_size(app, size) else None


def test_memory_grows_to_what_is_worth_it_and_goes_back_when_auto_ends(app, asked):
    before = app.ready_pod()
    size = app.node.wait(lambda: reached(app), SECONDS)
    assert size <= 256 * MIB
    app.node.wait(lambda: told(app).get("current") not in (None, "64Mi"), SECONDS)
    events = app.node.api.objects("v1/events", NAMESPACE)
    reasons = [e["message"] for e in events if e["reason"] == "SizeChosen" and app.name in str(e)]
    assert any("per pod instead of 64Mi:" in reason for reason in reasons), reasons
    hits(app, before, asked)  # it fills
    assert hits(app, before, asked) > 0.75
    (least, *_) = told(app)["curve"]
    assert least["size"] == "64Mi"
    assert float(least["hit"]) < 0.6

    app.spec["spec"]["autoscaling"]["mode"] = "Recommend"
    app.apply()
    app.node.wait(lambda: has_size(app, 64 * MIB), SECONDS)
    after = app.ready_pod()
    assert after.uid == before.uid
    assert no_restart_between(before, after)
