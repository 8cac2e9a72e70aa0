"""Reads the versions and the cache settings of some engines."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from lmcache.explain.text import plain
from lmcache_operator.commands.doctor.checks.engines import engine_port, has_tls
from lmcache_operator.commands.gather import PodFigures, natural_order, read_each
from lmcache_operator.kube.pod_http import Get
from lmcache_operator.pods.pods import is_ready
from lmcache_operator.specs import Object

_MAX_ENGINES = 4
"""Engines to read of each cluster. All engine pods of a cluster come from one template."""
_CONFIG = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'([a-z_]{1,64})="((?:[^"\\]|\\.){0,256})"')


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
    version, metrics = await asyncio.gather(get(*place, "/version"), get(*place, "/metrics"))
    if version.missing_right:
        return PodFigures(pod, problem=f"forbidden: {version.missing_right}")
    if HTTPStatus.OK not in (version.status, metrics.status):
        return PodFigures(
            pod, problem=plain(version.body.decode(errors="replace")) or f"HTTP {version.status}"
        )
    facts: dict[str, Any] = {"version": _version(version.body)}
    if metrics.status == HTTPStatus.OK and (config := _CONFIG.search(metrics.body.decode(errors="replace"))):
        facts["cache"] = dict(_LABEL.findall(config[1]))
    return PodFigures(pod, facts)


def _version(body: bytes) -> str:
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    return plain(parsed.get("version")) if isinstance(parsed, dict) else ""
