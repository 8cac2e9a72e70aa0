"""Servers of a remote tier as pods: what only a kubelet can show of them. The tests follow one another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testing.kube.api import Object
from testing.kube.operator import CLUSTERS
from testing.node.app import NAMESPACE, App
from testing.node.pods import Pod, is_ready

PROMPT = list(range(7, 7 + 256)) * 8


@pytest.fixture(scope="module")
def app(make_app, references) -> Iterator[App]:
    managed = {
        "shards": 2,
        "memoryPerShard": "512Mi",
        "image": references["redis"],
        "resources": {"requests": {"cpu": "50m"}},
    }
    app = make_app("shards", remote={"managed": managed})
    app.apply()
    yield app
    app.delete()


def servers(app: App) -> list[Pod]:
    selector = f"lmcache.io/cluster={app.name},lmcache.io/component=remote"
    return [Pod(app.node, obj) for obj in app.node.api.objects("v1/pods", NAMESPACE, selector)]


def status(app: App) -> Object:
    found: Object = app.node.api.get(CLUSTERS, app.name, NAMESPACE).get("status", {}).get("remote", {})
    return found


def test_what_is_computed_goes_to_the_servers(app):
    pod = app.ready_pod()
    app.wait_condition("RemoteTierAvailable")
    assert all(is_ready(server.object) for server in servers(app))
    pod.complete(PROMPT)
    app.node.wait(lambda: pod.stats()["remote"]["written"] >= len(PROMPT) // 256, 120)
    assert app.wait_condition("RemoteTierReachable")["reason"] == "Reachable"


def test_a_new_pod_finds_it_there(app):
    before = app.ready_pod()
    app.node.api.delete("v1/pods", before.name, NAMESPACE)
    pod = app.ready_pod(instead_of=before)
    pod.complete(PROMPT)
    app.node.wait(lambda: pod.stats()["remote"]["hits"] > 0, 120)


def test_a_server_more_reaches_a_sidecar_that_runs_on(app):
    before = app.ready_pod()
    app.spec["spec"]["tiers"]["remote"]["managed"]["shards"] = 3
    app.apply()
    app.node.wait(lambda: status(app).get("previousShards") == 2, 300)
    assert len(servers(app)) == status(app)["readyShards"] == 3
    # The kubelet brings a changed ConfigMap within a minute and a half.
    app.node.wait(lambda: f"{app.name}-remote-2." in before.stats()["remote"]["address"], 300)
    assert app.ready_pod().uid == before.uid
    assert before.stats()["remote"]["shards_problem"] == ""
    before.complete(PROMPT[::-1])
    app.node.wait(lambda: before.stats()["num_unwritten_rows"] == 0, 120)
    assert before.stats()["remote"]["is_reachable"]
