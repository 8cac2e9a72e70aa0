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
from kubernetes.aio.client.rest import RESTClientObject

from lmcache_operator.kube.shallow import loads
from lmcache_operator.specs.names import digest

_METADATA_ONLY = "application/json;as={};g=meta.k8s.io;v=v1"
_KIND = "PartialObjectMetadata"
_NEEDED = (
    "name", "namespace", "uid", "generation", "resourceVersion",
    "labels", "ownerReferences", "deletionTimestamp",
)  # fmt: skip


async def configuration() -> Configuration:
    """How to reach the API server: by $KUBECONFIG, as this pod, or by the home's file."""
    found, named = Configuration(), os.environ.get("KUBECONFIG")
    if named is None and "KUBERNETES_SERVICE_HOST" in os.environ:
        kube_config.load_incluster_config(client_configuration=found)
    else:
        await kube_config.load_kube_config(config_file=named, client_configuration=found)
    return found


def default_namespace() -> str:
    """Of the present context, as for kubectl."""
    _, context = kube_config.list_kube_config_contexts(os.environ.get("KUBECONFIG"))
    return (context.get("context") or {}).get("namespace") or "default"


async def login(**_: Any) -> kopf.AiohttpSession:
    """A session for kopf, which asks for another when the API server does not take its token any more.

    A coroutine, since a session belongs to the event loop it is made on.
    """
    server = await configuration()
    token = await server.get_api_key_with_prefix("BearerToken")
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=RESTClientObject(server).ssl_context),
        headers={"Authorization": token} if token else None,
        middlewares=(_ask_for_metadata,),
        response_class=_Response,
        proxy=server.proxy,
        trust_env=True,
    )
    return kopf.AiohttpSession(server=server.host, aiohttp_session=session)


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
    if annotations := item["metadata"].get("annotations"):
        # They may be large, and what counts is that they are others.
        metadata["annotations"] = {"digest": digest(annotations)}
    return {"apiVersion": item.get("apiVersion"), "kind": _KIND, "metadata": metadata}
