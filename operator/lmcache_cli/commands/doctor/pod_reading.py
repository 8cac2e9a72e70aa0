"""Reads the versions and the cache settings of some engines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from http import HTTPStatus

from lmcache_cli.commands.doctor.checks.engines import engine_port, has_tls, kind_of_pod
from lmcache_cli.commands.gather import PodFigures, natural_order, read_each
from lmcache_operator.kube.pod_http import Get
from lmcache_operator.pods.pods import is_ready
from lmcache_operator.specs import Object
from lmcache_store.common.text import plain

_MAX_ENGINES = 4
"""Engines to read of each cluster. All engine pods of a cluster come from one template."""


def natural(pod: Object) -> tuple[str, int]:
    """Sort key of pods: a number at the end of the name counts as a number."""
    return natural_order(pod["metadata"]["name"])


async def read_engines(
    get: Get, pods_of_clusters: Sequence[Sequence[Object]], *, seconds: float
) -> list[list[PodFigures]]:
    """Read some ready engines of each cluster: ``version`` and ``cache`` take the place of /stats."""
    chosen = [[pod for pod in sorted(pods, key=natural) if is_ready(pod)] for pods in pods_of_clusters]
    chosen = [pods[:_MAX_ENGINES] for pods in chosen]
    every_pod = [pod for pods in chosen for pod in pods]
    figures = iter(await read_each(every_pod, lambda pod: _read(get, pod), seconds=seconds))
    return [[next(figures) for _ in pods] for pods in chosen]


async def _read(get: Get, pod: Object) -> PodFigures:
    if has_tls(pod):
        return PodFigures(pod, problem="it serves HTTPS, which this command does not read")
    place = pod["metadata"]["namespace"], pod["metadata"]["name"], engine_port(pod)
    kind = kind_of_pod(pod)
    answers = await asyncio.gather(*(get(*place, path) for path in kind.pages))
    if answers[0].missing_right:
        return PodFigures(pod, problem=f"forbidden: {answers[0].missing_right}")
    if HTTPStatus.OK not in [answer.status for answer in answers]:
        problem = plain(answers[0].body.decode(errors="replace")) or f"HTTP {answers[0].status}"
        return PodFigures(pod, problem=problem)
    bodies = [answer.body if answer.status == HTTPStatus.OK else b"" for answer in answers]
    return PodFigures(pod, kind.read_pages(bodies))
