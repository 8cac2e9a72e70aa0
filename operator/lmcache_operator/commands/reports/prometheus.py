"""Reads the past of a cluster's cache from Prometheus, in seconds, whatever it answers."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import aiohttp

from lmcache.explain.text import plain
from lmcache_operator.commands.reports.history import History, Values

SECONDS = 4.0
"""Time for all answers of Prometheus. The command answers within five seconds."""
_MAX_BYTES = 8 << 20
_MAX_POINTS = 240
_MIN_STEP_SECONDS = 5
_MIN_WINDOW_SECONDS = 150
"""Shortest window of a rate: it must hold two scrapes, which may be a minute apart."""
_QUERIES = {
    "tokens": "sum by (cause) (rate(lmcache_cause_tokens_total{SELECTOR}[WINDOWs]))",
    "memory_used": "sum(lmcache_memory_tier_used_bytes{SELECTOR})",
    "memory_size": "sum(lmcache_memory_tier_size_bytes{SELECTOR})",
    "disk_used": 'sum(lmcache_tier_used_bytes{SELECTOR,tier="disk"})',
    "remote_used": 'max(lmcache_tier_used_bytes{SELECTOR,tier="remote"})',
}
"""Queries by the field of `History`. All sidecars share the remote tier, and each reports all of it."""


class _PrometheusError(Exception):
    """Prometheus has no usable answer. The message says why."""


async def read_history(url: str, namespace: str, name: str, now: float, seconds: float) -> History:
    """Read the last ``seconds`` of a cluster. A failure is a History with a problem."""
    step = max(_MIN_STEP_SECONDS, math.ceil(seconds / _MAX_POINTS))
    times = [math.floor(now) - step * number for number in range(int(seconds // step), -1, -1)]
    asked = {"start": f"{times[0]}", "end": f"{times[-1]}", "step": f"{step}"}
    shown = _without_password(url)
    forms = [{"query": _filled(query, namespace, name, step), **asked} for query in _QUERIES.values()]
    try:
        async with asyncio.timeout(SECONDS), aiohttp.ClientSession() as session:
            results = await asyncio.gather(*(_read(session, url, form) for form in forms))
    except TimeoutError:
        return History(problem=f"Prometheus at {shown} did not answer within {SECONDS:g} s.")
    except (_PrometheusError, aiohttp.ClientError, OSError, ValueError) as error:
        reason = plain(str(error)) or type(error).__name__
        return History(problem=f"Prometheus at {shown} cannot be used: {reason}.")
    series = {key: _series(result, times) for key, result in zip(_QUERIES, results, strict=True)}
    if not any(series.values()):
        return History(
            problem=f"Prometheus at {shown} has no metrics of this cluster. Its series need the labels "
            f'namespace="{namespace}" and lmcache_io_cluster="{name}", as the monitors of the chart set them.'
        )
    used = {tier: series[f"{tier}_used"].get("", ()) for tier in ("memory", "disk", "remote")}
    return History(
        times,
        series["tokens"],
        {tier: values for tier, values in used.items() if values},
        {"memory": values} if (values := series["memory_size"].get("")) else {},
    )


def _filled(query: str, namespace: str, name: str, step: int) -> str:
    selector = f"namespace={json.dumps(namespace)},lmcache_io_cluster={json.dumps(name)}"
    window = max(_MIN_WINDOW_SECONDS, 2 * step)
    return query.replace("SELECTOR", selector).replace("WINDOW", str(window))


async def _read(session: aiohttp.ClientSession, url: str, form: Mapping[str, str]) -> Any:
    """Return the ``result`` of one range query."""
    address = f"{url.rstrip('/')}/api/v1/query_range"
    async with session.get(address, params=form, allow_redirects=False) as response:
        body = bytearray()
        async for part in response.content.iter_chunked(1 << 16):
            body += part
            if len(body) > _MAX_BYTES:
                raise _PrometheusError(f"an answer is larger than {_MAX_BYTES >> 20} MiB")
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise _PrometheusError(f"HTTP {response.status}, and the answer is not JSON") from error
        if response.status != HTTPStatus.OK or not isinstance(answer, dict):
            reason = plain(answer.get("error")) if isinstance(answer, dict) else ""
            raise _PrometheusError(f"HTTP {response.status} {reason}".strip())
        data = answer.get("data")
        return data.get("result") if isinstance(data, dict) else None


def _series(result: Any, times: Values) -> dict[str, Values]:
    """Return the values of each series by its label ``cause``; "" if it has none."""
    places = {round(time): number for number, time in enumerate(times)}
    series: dict[str, Values] = {}
    for each in result if isinstance(result, list) else ():
        labels, points = (each.get("metric"), each.get("values")) if isinstance(each, dict) else ({}, ())
        values = [math.nan] * len(times)
        for point in points if isinstance(points, list) else ():
            time, value = _number(point, 0), _number(point, 1)
            if math.isfinite(time) and math.isfinite(value) and round(time) in places:
                values[places[round(time)]] = max(0.0, value)
        cause = labels.get("cause", "") if isinstance(labels, dict) else ""
        if isinstance(cause, str) and not all(map(math.isnan, values)):
            series[cause] = values
    return series


def _number(point: Any, index: int) -> float:
    try:
        return float(point[index])
    except (TypeError, ValueError, LookupError):
        return math.nan


def _without_password(url: str) -> str:
    """Return a URL for a page that others read."""
    scheme, separator, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}".partition("?")[0]
