"""Reading a cluster and the figures of its sidecars."""

import asyncio
import json
from typing import Any

import pytest

from lmcache_cli.commands.connection import ApiConnection
from lmcache_cli.commands.gather import (
    NO_TIME,
    PodFigures,
    late_pods,
    missing_rights,
    pods_of,
    read_each,
    read_stats,
    sidecar_port,
)
from lmcache_operator.kube.pod_http import CREATE_FORWARD, GET_PROXY, PodAnswer
from tests.harness import jumping_loop
from tests.harness.commands.command_world import pod, stats


def read(answer: PodAnswer, **changes: Any) -> PodFigures:
    """Return what is known of a pod that answers so."""

    async def get(*_: Any) -> PodAnswer:
        return answer

    [figures] = asyncio.run(read_stats(get, [pod(**changes)]))
    return figures


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (PodAnswer(200, b"<html>\x1b[31m"), "the answer of port 9464 is not of a sidecar: <html> [31m"),
        (PodAnswer(200, b"[1]"), "the answer of port 9464 is not of a sidecar: [1]"),
        (PodAnswer(200, b"[" * 100_000), "the answer of port 9464 is not of a sidecar: " + "[" * 80),
        (PodAnswer(200, b"{}"), "the answer of port 9464 is not of a sidecar: {}"),
        (PodAnswer(500, b"broken\nhere"), "HTTP 500: broken here"),
        (PodAnswer(0, b"no answer within 3 s"), "no answer within 3 s"),
        (PodAnswer(0, b"no", GET_PROXY), "forbidden: get pods/proxy"),
    ],
)
def test_other_answers_are_problems(answer: PodAnswer, problem: str) -> None:
    figures = read(answer)
    assert (figures.stats, figures.problem) == ({}, problem)


def test_pods_that_cannot_answer_are_not_asked() -> None:
    readable = PodAnswer(200, json.dumps(stats()).encode())
    assert (read(readable).stats, read(readable).problem) == (stats(), "")
    assert read(readable, phase="Pending").problem == "the pod is Pending"
    assert read(readable, initContainers=[]).problem == "the pod has no sidecar"


def test_hanging_pods_do_not_delay_the_answers_of_others() -> None:
    """70 pods hang, which is more than are asked at once."""

    async def ask(asked: Any) -> PodFigures:
        if int(asked["metadata"]["name"].rpartition("-")[2]) < 60:
            await asyncio.Event().wait()
        return PodFigures(asked, {"is_ready": True})

    async def read_all() -> tuple[list[PodFigures], float]:
        return await read_each([pod(number) for number in range(200)], ask, seconds=0.5), jumping_loop.now()

    read_figures, seconds = jumping_loop.run(read_all())
    assert seconds == 0.5
    assert [bool(figures.stats) for figures in read_figures] == [False] * 60 + [True] * 140
    assert read_figures[0].problem == NO_TIME
    assert late_pods(read_figures)[0].startswith("All figures lack 60 of 200 sidecars")
    assert late_pods(read_figures[60:]) == []


def test_injected_sidecars_can_listen_on_another_port() -> None:
    ports = [{"name": "other", "containerPort": 1}, {"name": "lmcache-metrics", "containerPort": 9999}]
    assert sidecar_port(pod(initContainers=[{"name": "lmcache-sidecar", "ports": ports}])) == 9999
    assert sidecar_port(pod(initContainers=[{"name": "sidecar"}])) == 9464
    assert sidecar_port(pod(initContainers=None)) is None


def test_missing_right_is_said_once_for_all_pods() -> None:
    forbidden = [PodFigures(pod(number), problem=f"forbidden: {CREATE_FORWARD}") for number in range(3)]
    [sentence] = missing_rights(forbidden, "team")
    for part in ("demo-engine-0 and 2 more", '"get pods/proxy"', "`kubectl lmcache doctor -n team` prints"):
        assert part in sentence
    assert missing_rights([PodFigures(pod())], "team") == []


def test_pods_are_in_the_order_of_their_numbers() -> None:
    class Api:
        async def find(self, *_: Any, labelSelector: str) -> list[Any]:
            return [pod(10), pod(2)] if "inject" not in labelSelector else [pod(2)]

    pods = asyncio.run(pods_of(ApiConnection(Api(), "default"), "demo"))
    assert [each["metadata"]["name"] for each in pods] == ["demo-engine-2", "demo-engine-10"]
