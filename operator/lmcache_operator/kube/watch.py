"""What kopf gets to see of the API server: names and owners, never an object's content.

kopf wakes clusters and decides nothing, so lists and watches of namespaced objects are asked for as metadata
only, and of that the little that is needed goes on. It keeps the memory small, and an object that is odd or
thousands of levels deep can't stop a watch for everybody.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import kopf
from kubernetes.aio import config as kube_config
from kubernetes.aio.client import Configuration

from lmcache_operator.kube.shallow import loads

_METADATA_ONLY = "application/json;as={};g=meta.k8s.io;v=v1"
_KIND = "PartialObjectMetadata"
_NEEDED = ("name", "namespace", "uid", "resourceVersion", "labels", "ownerReferences", "deletionTimestamp")


def is_in_cluster() -> bool:
    """Whether this is a pod that was not given a kubeconfig."""
    return "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ


async def login(**kwargs: Any) -> kopf.AiohttpSession | None:
    """A kubeconfig where one is named or found, else the pod's ServiceAccount; for kopf.

    A coroutine, though it waits for nothing: a session belongs to the event loop it is made on.
    """
    in_cluster = is_in_cluster()
    info = (kopf.login_with_service_account if in_cluster else kopf.login_with_kubeconfig)(**kwargs)
    if info is None:
        return None
    server = info.server
    if in_cluster:  # by its address, as every other client: kopf would ask a DNS server for a name
        configuration = Configuration()
        kube_config.load_incluster_config(client_configuration=configuration)
        server = configuration.host
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
        headers=info.as_http_headers(),
        middlewares=(_ask_for_metadata,),
        response_class=_Response,
        proxy=info.proxy_url,
        trust_env=bool(info.trust_env),
    )
    return kopf.AiohttpSession(
        server=server, default_namespace=info.default_namespace, aiohttp_session=session
    )


async def _ask_for_metadata(
    request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    is_watch, is_list = "watch" in request.url.query, "limit" in request.url.query
    # The content of definitions is what kopf watches them for.
    if (is_watch or is_list) and not request.url.path.endswith("/customresourcedefinitions"):
        request.headers["Accept"] = _METADATA_ONLY.format(_KIND if is_watch else f"{_KIND}List")
    return await handler(request)


class _Response(aiohttp.ClientResponse):
    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        await super().start(connection)
        if "watch" in self.url.query:
            self.content = _Events(self.content)  # type: ignore[assignment]
        return self

    async def json(self, **_: Any) -> Any:
        answer = loads(await self.read())
        if isinstance(answer, dict) and answer.get("kind") == f"{_KIND}List":
            answer["items"] = [_slim(item) for item in answer["items"] or ()]
        return answer


class _Events:
    """The lines of a watch, as a stream of whole lines."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, num_bytes: int) -> AsyncIterator[bytes]:
        rest = bytearray()
        async for chunk in self._content.iter_chunked(num_bytes):
            rest += chunk
            *lines, last = rest.split(b"\n")
            rest = last
            for line in filter(None, lines):
                event = loads(bytes(line))
                event["object"] = _slim(event["object"])
                yield json.dumps(event).encode() + b"\n"


def _slim(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("kind") != _KIND:
        return item
    metadata = {key: value for key, value in item["metadata"].items() if key in _NEEDED}
    return {"apiVersion": item.get("apiVersion"), "kind": _KIND, "metadata": metadata}
