"""A thin client on plain dicts: what the operator needs, and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import config as kube_config
from kubernetes.aio.client import ApiClient, Configuration

from .. import metrics
from ..specs import Object
from ..specs.kinds import BY_NAME, POD, SECRET, Kind, Ref
from ..specs.names import FIELD_MANAGER
from .errors import ApiError, Refused, error_of

_JSON = "application/json"
_APPLY = "application/apply-patch+yaml"
_REQUEST_SECONDS = 30.0
_PAGE_SIZE = "500"


@asynccontextmanager
async def connect(kubeconfig: str | None, *, max_requests: int = 64) -> AsyncIterator[KubeApi]:
    """A client for the cluster named by a kubeconfig, or for the one this pod runs in."""
    configuration = Configuration()
    if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
        kube_config.load_incluster_config(client_configuration=configuration)
    else:
        await kube_config.load_kube_config(config_file=kubeconfig, client_configuration=configuration)
    configuration.connection_pool_maxsize = max_requests
    async with ApiClient(configuration) as client:
        yield KubeApi(client, max_requests)


class KubeApi:
    """Calls to the API server. All of them raise ApiError, and all of them may be repeated."""

    def __init__(self, client: ApiClient, max_requests: int) -> None:
        self._client = client
        self._slots = asyncio.Semaphore(max_requests)

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """An object, or None if there is none."""
        status, found = await self._call("GET", _path(kind, namespace, name), accept=(HTTPStatus.NOT_FOUND,))
        return found if status == HTTPStatus.OK else None

    async def list(self, kind: Kind, namespace: str, selector: Mapping[str, str]) -> list[Object]:
        """All objects with these labels; none for a kind that the API server does not know."""
        query = {
            "labelSelector": ",".join(f"{key}={value}" for key, value in selector.items()),
            "limit": _PAGE_SIZE,
        }
        items: list[Object] = []
        while True:
            status, page = await self._call(
                "GET", _path(kind, namespace), query=query, accept=(HTTPStatus.NOT_FOUND,)
            )
            if status == HTTPStatus.NOT_FOUND:
                return []
            items += page["items"]
            if not (proceed := page["metadata"].get("continue")):
                return [{**item, "apiVersion": kind.api_version, "kind": kind.kind} for item in items]
            query["continue"] = proceed

    async def apply(self, wanted: Object) -> Object:
        """Server-side apply: the fields of `wanted` become ours, and those we no longer name are given up."""
        return await self._apply(wanted, "")

    async def apply_status(self, wanted: Object) -> Object:
        """The same for the status subresource."""
        return await self._apply(wanted, "/status")

    async def delete(self, ref: Ref, namespace: str, uid: str) -> None:
        """Delete this very object; nothing happens if it is gone or has been replaced."""
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        path = _path(BY_NAME[ref.kind], namespace, ref.name)
        await self._call("DELETE", path, body=body, accept=(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT))

    async def evict(self, namespace: str, pod: str, uid: str) -> bool:
        """Ask for a pod's eviction. False if a disruption budget forbids it at present."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": uid}},
        }
        path = _path(POD, namespace, pod) + "/eviction"
        accept = (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS)
        status, _ = await self._call("POST", path, body=body, accept=accept)
        return status != HTTPStatus.TOO_MANY_REQUESTS

    async def secret_exists(self, namespace: str, name: str) -> bool:
        """Whether there is a Secret of this name, without the permission to read it.

        A dry run of its creation changes nothing and is answered by "already exists". An answer that says
        neither counts as existing: the kubelet will report what is wrong.
        """
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "namespace": namespace}}
        try:
            status, _ = await self._call(
                "POST",
                _path(SECRET, namespace),
                query={"dryRun": "All"},
                body=body,
                accept=(HTTPStatus.CONFLICT,),
            )
        except Refused:
            return True
        return status == HTTPStatus.CONFLICT

    async def _apply(self, wanted: Object, subresource: str) -> Object:
        metadata = wanted["metadata"]
        path = _path(BY_NAME[wanted["kind"]], metadata["namespace"], metadata["name"]) + subresource
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        live: Object
        _, live = await self._call("PATCH", path, query=query, body=wanted, content_type=_APPLY)
        return live

    async def _call(
        self,
        verb: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = _JSON,
        accept: tuple[int, ...] = (),
    ) -> tuple[int, Any]:
        """One request: its status and its answer. Raises ApiError for failures that are not in `accept`."""
        headers = {"Accept": _JSON, "Content-Type": content_type}
        path = f"{path}?{urlencode(query)}" if query else path
        request = await self._client.param_serialize(
            verb, path, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        async with self._slots:
            status, data = await self._send(*request)
        metrics.API_REQUESTS.labels(verb=verb, code=str(status)).inc()
        if status not in accept and not HTTPStatus.OK <= status < HTTPStatus.BAD_REQUEST:
            raise error_of(f"{verb} {path}", status, data)
        return status, json.loads(data)

    async def _send(
        self, method: str, url: str, headers: Any, body: Any, _post_params: Any
    ) -> tuple[int, bytes]:
        try:
            response = await self._client.call_api(
                method, url, headers, body, _request_timeout=_REQUEST_SECONDS
            )
            return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return 0, json.dumps({"message": f"no answer: {error or type(error).__name__}"}).encode()


def _path(kind: Kind, namespace: str, name: str | None = None) -> str:
    root = f"/apis/{kind.group}/{kind.version}" if kind.group else f"/api/{kind.version}"
    collection = f"{root}/namespaces/{namespace}/{kind.plural}"
    return f"{collection}/{name}" if name else collection


__all__ = ["ApiError", "KubeApi", "connect"]
