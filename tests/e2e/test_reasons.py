"""What keeps pods from running, as the kubelet tells it and a cluster's condition passes it on.

The engine is one that only says that it is healthy. A pod that serves nothing is replaced as soon as another
one is declared, so each test declares its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from testing.kube.api import Object
from testing.node.app import READY_SECONDS, App
from testing.node.cluster import NODE, NodeCluster
from tests.harness.programs import IDLE, offer_programs, use_program

NAME = PROGRAMS = "reasons"
DIES = """#!/bin/sh
echo loading the model >&2
echo there is no room for it >&2
exit 3
"""
NOWHERE = {"name": "nowhere", "key": "token"}


@pytest.fixture(scope="module")
def declared(make_app: Callable[..., App], installed: NodeCluster) -> Iterator[Callable[..., App]]:
    offer_programs(installed, PROGRAMS, idle=IDLE, dies=DIES)
    yield partial(declare, make_app)
    make_app(NAME).delete()


def declare(
    make_app: Callable[..., App],
    program: str = "idle",
    env: Object | None = None,
    volume: Object | None = None,
) -> App:
    """The one cluster, whose engine is that program and has a variable and a volume more."""
    app = make_app(NAME)
    use_program(app, PROGRAMS, program)
    template = app.spec["spec"]["engine"]["podTemplate"]["spec"]
    (container,) = template["containers"]
    if env:
        container["env"].append({"name": "MORE"} | env)
    if volume:
        template["volumes"].append({"name": "more"} | volume)
        container["volumeMounts"].append({"name": "more", "mountPath": "/more"})
    app.apply()
    return app


def told(app: App, reason: str) -> str:
    """What the condition says when that is its reason; the pods are not Ready then."""

    def look() -> str | None:
        found = app.conditions().get("Degraded", {})
        return found["message"] if found.get("reason") == reason else None

    message = app.node.wait(look, READY_SECONDS)
    assert app.conditions()["Ready"]["status"] == "False"
    return message


def test_an_engine_that_ends_again_and_again_is_told_with_its_last_lines(declared):
    message = told(declared("dies"), "CrashLoopBackOff")
    assert message.startswith(f"pod {NAME}-engine-0, container engine: ended ")
    assert message.endswith("exit code 3: loading the model | there is no room for it")


def test_a_volume_that_can_not_be_mounted_is_told(declared):
    app = declared(volume={"secret": {"secretName": NOWHERE["name"]}})
    assert 'secret "nowhere" not found' in told(app, "FailedMount")


def test_a_variable_without_its_secret_is_told(declared):
    message = told(declared(env={"valueFrom": {"secretKeyRef": NOWHERE}}), "CreateContainerConfigError")
    assert message == f'pod {NAME}-engine-0, container engine: secret "nowhere" not found'


def test_a_node_that_is_not_heard_of_is_told_until_it_comes_back(declared):
    app = declared()
    before = app.ready_pod()
    app.wait_condition("Ready")
    app.node.stop_kubelet()
    try:
        assert f"its node {NODE} has not been ready since" in told(app, "NodeLost")
    finally:
        app.node.start_kubelet()
    app.wait_condition("Ready")
    app.node.wait(lambda: app.conditions()["Degraded"]["reason"] != "NodeLost")
    assert app.ready_pod().uid == before.uid
