"""Reasons why pods do not run, as the kubelet reports them and the cluster's condition repeats them.

The engine is a program that only reports that it is healthy. A pod that serves nothing is replaced as soon as
the spec changes, so each test applies its own spec.
"""

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from testing.kube.api import Object
from testing.node.app import READY_SECONDS, App
from testing.node.cluster import NODE, NodeCluster
from tests.harness.commands.programs import IDLE, offer_programs, use_program

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
    """Apply the cluster with this engine program, and with an extra variable and an extra volume."""
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


def degraded_message(app: App, reason: str) -> str:
    """Wait until the condition Degraded has this reason. Returns its message. Pods must not be Ready then."""

    def message_of_reason() -> str | None:
        condition = app.conditions().get("Degraded", {})
        return condition["message"] if condition.get("reason") == reason else None

    message = app.node.wait(message_of_reason, READY_SECONDS)
    assert app.conditions()["Ready"]["status"] == "False"
    return message


def test_crash_looping_engine_is_reported_with_its_last_lines(declared):
    message = degraded_message(declared("dies"), "CrashLoopBackOff")
    assert message.startswith(f"pod {NAME}-engine-0, container engine: ended ")
    assert message.endswith("exit code 3: loading the model | there is no room for it")


def test_volume_that_cannot_be_mounted_is_reported(declared):
    app = declared(volume={"secret": {"secretName": NOWHERE["name"]}})
    assert 'secret "nowhere" not found' in degraded_message(app, "FailedMount")


def test_variable_without_its_secret_is_reported(declared):
    message = degraded_message(
        declared(env={"valueFrom": {"secretKeyRef": NOWHERE}}), "CreateContainerConfigError"
    )
    assert message == f'pod {NAME}-engine-0, container engine: secret "nowhere" not found'


def test_unreachable_node_is_reported_until_it_recovers(declared):
    app = declared()
    before = app.ready_pod()
    app.wait_condition("Ready")
    app.node.stop_kubelet()
    try:
        assert f"its node {NODE} has not been ready since" in degraded_message(app, "NodeLost")
    finally:
        app.node.start_kubelet()
    app.wait_condition("Ready")
    app.node.wait(lambda: app.conditions()["Degraded"]["reason"] != "NodeLost")
    assert app.ready_pod().uid == before.uid
