"""Reads that the API server refuses, by namespace: reported once, and repeated until they are allowed.

A watched namespace may be deleted, terminate for a long time, or lose the operator's RoleBinding. kopf would
end the process then, and no other namespace would be served.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections import defaultdict
from http import HTTPStatus

import aiohttp

from lmcache_operator import metrics
from lmcache_operator.kube.refusals import error_of
from lmcache_store.common.backoff import Backoff

logger = logging.getLogger(__name__)

STATUSES = frozenset({HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND})
"""Statuses of refused lists and watches. 404: the definition of the kind was deleted."""
ALL_NAMESPACES = "*"
_BACKOFF = Backoff(base=1.0, cap=15.0)
_SECONDS = 30.0
"""Timeout of one request."""
_PATH = re.compile(r"(?:/namespaces/([^/]+))?/([^/]+)$")

_refused: defaultdict[str, set[str]] = defaultdict(set)


async def answer(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Send a request, and read its body. Raises TimeoutError."""
    async with asyncio.timeout(_SECONDS):
        response = await handler(request)
        await response.read()
    return response


async def until_allowed(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Send a list request, and repeat it while the API server refuses it.

    Raises TimeoutError, and ClientPayloadError if the next page of a list has expired. kopf lists again then.
    """
    namespace, read = _read(request.url.path, "list")
    for attempt in itertools.count(1):
        response = await answer(request, handler)
        if response.status == HTTPStatus.GONE:
            raise aiohttp.ClientPayloadError(f"{read}: the list has expired")
        if response.status not in STATUSES:
            break
        refuse(namespace, read, error_of(read, response.status, await response.read()).message)
        await asyncio.sleep(_BACKOFF.seconds(attempt))
    allow(namespace, read)
    return response


def wait_after_watch(path: str, status: int) -> float | None:
    """Note the answer to a watch. Returns the seconds until kopf may repeat it; None: it is not refused.

    A Role may allow lists and no watches. Without a wait, kopf would list ten times a second.
    """
    namespace, read = _read(path, "watch")
    if status not in STATUSES:
        allow(namespace, read)
        return None
    is_repeated = read in _refused[namespace]
    refuse(namespace, read, f"HTTP {status}")
    return _BACKOFF.cap if is_repeated else _BACKOFF.base


def _read(path: str, verb: str) -> tuple[str, str]:
    match = _PATH.search(path)
    assert match is not None
    return match[1] or ALL_NAMESPACES, f"{verb} {match[2]}"


def refuse(namespace: str, read: str, message: str) -> None:
    """Note a refused read. The first one of a namespace is logged."""
    if not _refused[namespace]:
        text = "namespace %s is not served: the API server refuses to %s: %s. The operator retries"
        logger.warning(text, namespace, read, message)
    _refused[namespace].add(read)
    _measure(namespace)


def allow(namespace: str, read: str) -> None:
    """Note a read that succeeded. The last one that was refused is logged."""
    if read in _refused[namespace]:
        _refused[namespace].remove(read)
        _measure(namespace)
        if not _refused[namespace]:
            logger.info("namespace %s is served again", namespace)


def _measure(namespace: str) -> None:
    metrics.REFUSED_READS.labels(namespace).set(len(_refused[namespace]))
