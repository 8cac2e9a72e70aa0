"""Reads a cluster and the figures of its sidecars, within seconds even if some sidecars do not answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple

from lmcache_cli.commands.connection import ApiConnection, api_offset
from lmcache_cli.commands.pod_state import reason_of_silence
from lmcache_operator.components.injection.profile import SIDECARS
from lmcache_operator.errors import ApiError
from lmcache_operator.kube.pod_http import CREATE_FORWARD, GET_PROXY, Get, PodHttp
from lmcache_operator.pods.pods import is_running
from lmcache_operator.specs import Object, names
from lmcache_operator.specs.kinds import POD
from lmcache_store.common.text import plain

_ALL_SECONDS, POD_SECONDS = 4.5, 3.0
"""Time for all sidecars of a cluster, and for one. A command answers within five seconds."""
_MAX_AT_ONCE = 64
_METRICS_PORTS = ("metrics", "lmcache-metrics")
NO_TIME = "no answer before the time for all pods was over"
"""Problem of a pod whose turn did not come, or came late."""


class PodFigures(NamedTuple):
    """One engine pod, and what its sidecar answered."""

    pod: Object
    stats: Mapping[str, Any] = {}
    """/stats of the sidecar; empty if it did not answer."""
    problem: str = ""
    """Why there is no answer; empty: there is one."""
    answered_at: float = 0.0
    """Time of the answer on the user's clock, in seconds since 1970."""

    @property
    def name(self) -> str:
        """Name of the pod."""
        return str(self.pod["metadata"]["name"])


@dataclass(frozen=True)
class Gathered:
    """Figures of a cluster and its sidecars. All commands show parts of them."""

    cluster: Object
    pods: tuple[PodFigures, ...]
    """Engine pods, and the pods with the cluster's cache injected, by name."""
    problems: tuple[str, ...]
    """Sentences about figures that could not be read, with what to do."""
    time: float = field(default_factory=time.time)
    """Seconds since 1970."""
    api_offset: float = 0.0
    """Clock of the API server minus the clock of the user, in seconds."""

    @property
    def stats(self) -> list[Mapping[str, Any]]:
        """/stats of all sidecars that answered."""
        return [pod.stats for pod in self.pods if pod.stats]


async def gather(connection: ApiConnection, name: str | None) -> Gathered:
    """Read an LMCacheCluster, its pods, and /stats of their sidecars. Raises ApiError or NotFoundError."""
    return await gather_of(connection, await connection.cluster(name))


async def gather_of(connection: ApiConnection, cluster: Object) -> Gathered:
    """Read the pods of an LMCacheCluster, and /stats of their sidecars."""
    reading = _read_pods(connection, cluster["metadata"]["name"])
    offset, (figures, problems) = await asyncio.gather(api_offset(connection.api), reading)
    return Gathered(cluster, tuple(figures), tuple(problems), api_offset=offset or 0.0)


async def _read_pods(connection: ApiConnection, name: str) -> tuple[list[PodFigures], list[str]]:
    try:
        pods = await pods_of(connection, name)
    except ApiError as error:
        return [], [f"the pods cannot be listed: {plain(error.message)}"]
    figures = await read_stats(PodHttp(connection.api, seconds=POD_SECONDS).get, pods)
    return figures, missing_rights(figures, connection.namespace) + late_pods(figures)


async def pods_of(connection: ApiConnection, name: str | None) -> list[Object]:
    """Return the engine pods of a cluster and the pods with its cache injected, by name. Raises ApiError.

    ``name``: None for the pods of all clusters of the namespace.
    """
    value = "" if name is None else f"={name}"
    engines = f"{names.CLUSTER_LABEL}{value},{names.COMPONENT_LABEL}={names.ENGINE}"
    selectors = engines, f"{names.INJECT_LABEL}{value}"
    matching = await asyncio.gather(
        *(connection.api.find(POD, connection.namespace, labelSelector=selector) for selector in selectors)
    )
    by_name = {pod["metadata"]["name"]: pod for pods in matching for pod in pods}
    return sorted(by_name.values(), key=natural_order)


async def read_stats(get: Get, pods: Sequence[Object], *, seconds: float = _ALL_SECONDS) -> list[PodFigures]:
    """Read /stats of all pods, several at once. Pods that are not reached in time get the reason."""
    return await read_each(pods, lambda pod: read_page(get, pod, "/stats"), seconds=seconds)


async def read_each(
    pods: Sequence[Object], read: Callable[[Object], Any], *, seconds: float = _ALL_SECONDS
) -> list[PodFigures]:
    """Call ``read`` for all pods, several at once, and return the answers in the order of the pods."""
    slots = asyncio.Semaphore(_MAX_AT_ONCE)
    answers: dict[str, PodFigures] = {}

    async def ask(pod: Object) -> None:
        async with slots:
            answers[pod["metadata"]["uid"]] = await read(pod)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*map(ask, pods), return_exceptions=True)
    return [answers.get(pod["metadata"]["uid"]) or PodFigures(pod, problem=NO_TIME) for pod in pods]


async def read_page(get: Get, pod: Object, path: str) -> PodFigures:
    """Read a JSON object from the sidecar of a pod. It takes the place of /stats."""
    if not is_running(pod):
        return PodFigures(pod, problem=f"the pod is {pod['status'].get('phase', 'Pending')}")
    port = sidecar_port(pod)
    if port is None:
        return PodFigures(pod, problem="the pod has no sidecar")
    metadata = pod["metadata"]
    answer = await get(metadata["namespace"], metadata["name"], port, path)
    text = plain(answer.body.decode(errors="replace"))
    if answer.missing_right:
        return PodFigures(pod, problem=f"forbidden: {answer.missing_right}")
    if answer.status != HTTPStatus.OK:
        return PodFigures(
            pod, problem=f"HTTP {answer.status}: {text}" if answer.status else reason_of_silence(text)
        )
    try:
        stats = json.loads(answer.body)
    except (ValueError, RecursionError):
        stats = None
    if not isinstance(stats, dict) or not stats:
        return PodFigures(pod, problem=f"the answer of port {port} is not of a sidecar: {text[:80]}")
    return PodFigures(pod, stats, answered_at=time.time())


def objects_in(part: Mapping[str, Any], name: str, max_items: int) -> list[Mapping[str, Any]]:
    """Return the first objects of a list in a sidecar's answer. Pods are not trusted."""
    value = part.get(name)
    listed = value[:max_items] if isinstance(value, list) else []
    return [each for each in listed if isinstance(each, Mapping)]


def sidecar_port(pod: Object) -> int | None:
    """Return the port of the sidecar's HTTP server; None if the pod has no sidecar."""
    containers = [*(pod["spec"].get("initContainers") or ()), *(pod["spec"].get("containers") or ())]
    for container in containers:
        if container["name"] in SIDECARS:
            ports = container.get("ports") or ()
            named = (port["containerPort"] for port in ports if port.get("name") in _METRICS_PORTS)
            return int(next(named, names.SIDECAR_PORT))
    return None


def missing_rights(figures: Sequence[PodFigures], namespace: str) -> list[str]:
    """Return a sentence for the right that keeps the user from asking sidecars, if one is missing."""
    forbidden = [each.name for each in figures if each.problem.startswith("forbidden: ")]
    if not forbidden:
        return []
    more = f" and {len(forbidden) - 1} more" if len(forbidden) > 1 else ""
    return [
        f'Your user may not read the sidecar of {forbidden[0]}{more}. It needs the right "{GET_PROXY}", or '
        f'"{CREATE_FORWARD}", in namespace {namespace}. '
        f"`kubectl lmcache doctor -n {namespace}` prints the commands that grant it."
    ]


def late_pods(figures: Sequence[PodFigures]) -> list[str]:
    """Return a sentence if there was not enough time to ask all sidecars."""
    number = sum(each.problem == NO_TIME for each in figures)
    if not number:
        return []
    return [
        f"All figures lack {number} of {len(figures)} sidecars: the time for all pods was over. "
        "Run the command again, or closer to the API server."
    ]


def problems_of(pods: Sequence[PodFigures], problems: Iterable[str]) -> list[str]:
    """Return the problems of all pods together, and a line for each pod that did not answer."""
    silent = [f"{pod.name}: {plain(pod.problem)}" for pod in pods if pod.problem]
    return [*problems, *silent]


def natural_order(pod: Object) -> tuple[str, int]:
    """Sort key of pods: a number at the end of the name counts as a number."""
    name = str(pod["metadata"]["name"])
    start, _, end = name.rpartition("-")
    return (start, int(end)) if end.isdecimal() else (name, -1)
