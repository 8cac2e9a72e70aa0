"""kopf's access to the API server, limited to the metadata of objects.

kopf only wakes clusters, for which names and owners are enough. So lists and watches request metadata only,
and unneeded fields are dropped. That saves memory, and a malformed or very deep object can't stop a watch.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import kopf
from kubernetes.aio import config as kube_config
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from kubernetes.aio.config.kube_config import KubeConfigMerger

from lmcache_operator.errors import FileError
from lmcache_operator.kube import refused_reads
from lmcache_operator.kube.shallow import loads
from lmcache_operator.specs.kinds import controller_of
from lmcache_operator.specs.names import MANAGED_BY_LABEL, digest

_METADATA_ONLY = "application/json;as={};g=meta.k8s.io;v=v1"
_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_KIND = "PartialObjectMetadata"
_EXPIRED = b'{"type":"ERROR","object":{"code":410}}\n'
_NEEDED = ("name", "namespace", "uid", "generation", "resourceVersion", "deletionTimestamp")


async def configuration(context: str | None = None) -> Configuration:
    """Configuration of the API server, from $KUBECONFIG, this pod's ServiceAccount, or ~/.kube/config.

    ``context``: context of the kubeconfig; None: the present one.
    """
    settings, kubeconfig = Configuration(), os.environ.get("KUBECONFIG")
    if _is_in_pod():
        kube_config.load_incluster_config(client_configuration=settings)
    else:
        await kube_config.load_kube_config(
            config_file=kubeconfig, context=context, client_configuration=settings
        )
    return settings


def _is_in_pod() -> bool:
    return "KUBECONFIG" not in os.environ and "KUBERNETES_SERVICE_HOST" in os.environ


def context_of(name: str | None = None) -> tuple[str, str]:
    """Name and namespace of a context of the kubeconfig, as kubectl uses them. None: the present context.

    In a pod without a kubeconfig, the name is empty, and the namespace is that of the pod.

    Raises:
        FileError: there is no kubeconfig.
        ConfigException: it has no such context.
    """
    if _is_in_pod():
        return "", _POD_NAMESPACE.read_text(encoding="utf-8")
    files = os.environ.get("KUBECONFIG", "~/.kube/config")
    if not any(Path(file).expanduser().exists() for file in files.split(os.pathsep)):
        raise FileError(
            f"{files}: there is no such file. Name your kubeconfig with --kubeconfig or KUBECONFIG"
        )
    config = KubeConfigMerger(files).config
    contexts = {each.value["name"]: each.value["context"] for each in config.value["contexts"]}
    name, listed = name or config.value.get("current-context"), ", ".join(contexts) or "none"
    if not name:
        raise kube_config.ConfigException(f"it has no present context: choose {listed} with --context")
    if name not in contexts:
        raise kube_config.ConfigException(f"there is no context {name!r}: it has {listed}")
    return name, (contexts[name] or {}).get("namespace") or "default"


async def login(**_: Any) -> kopf.AiohttpSession:
    """Open a session for kopf. kopf calls this again when the API server rejects its token.

    This is a coroutine, because a session belongs to the event loop on which it is created.
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
    # kopf needs the content of custom resource definitions.
    if (is_watch or is_list) and not request.url.path.endswith("/customresourcedefinitions"):
        request.headers["Accept"] = _METADATA_ONLY.format(_KIND if is_watch else f"{_KIND}List")
        if is_list:
            return await refused_reads.until_allowed(request, handler)
    return await (handler(request) if is_watch else refused_reads.answer(request, handler))


class _Response(aiohttp.ClientResponse):
    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        await super().start(connection)
        if "watch" in self.url.query:
            wait = refused_reads.wait_after_watch(self.url.path, self.status)
            self.status = self.status if wait is None else HTTPStatus.OK
            self.content = _Events(self.content, wait)  # type: ignore[assignment]
        return self

    async def json(self, **_: Any) -> Any:
        # Reduced while they are parsed: users choose how many labels and annotations an object has.
        answer = loads(await self.read(), _slim)
        if isinstance(answer, dict) and answer.get("kind") == f"{_KIND}List":
            answer["items"] = answer["items"] or []
        return answer


class _Events:
    """The stream of a watch, one reduced event per line.

    A refused watch has expired after ``wait`` seconds, for kopf: it lists again, and the list waits until the
    API server allows it.
    """

    def __init__(self, content: aiohttp.StreamReader, wait: float | None) -> None:
        self._content, self._wait = content, wait

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, num_bytes: int) -> AsyncIterator[bytes]:
        if self._wait is not None:
            await asyncio.sleep(self._wait)
            yield _EXPIRED
            return
        rest = bytearray()
        async for chunk in self._content.iter_chunked(num_bytes):
            rest += chunk
            *lines, last = rest.split(b"\n")
            rest = last
            for line in filter(None, lines):
                yield json.dumps(loads(bytes(line), _slim)).encode() + b"\n"


def _slim(item: dict[str, Any]) -> dict[str, Any]:
    """The needed part of an object's metadata. Other objects are returned as they are."""
    metadata = item.get("metadata")
    if item.get("kind") != _KIND or not isinstance(metadata, dict):
        return item
    slim = {key: value for key, value in metadata.items() if key in _NEEDED}
    if annotations := metadata.get("annotations"):
        # Annotations may be large, and only their changes matter.
        slim["annotations"] = {"digest": digest(annotations)}
    if mark := (metadata.get("labels") or {}).get(MANAGED_BY_LABEL):
        slim["labels"] = {MANAGED_BY_LABEL: mark}
    if owner := controller_of(metadata):
        slim["ownerReferences"] = [owner]
    return {"apiVersion": item.get("apiVersion"), "kind": _KIND, "metadata": slim}
