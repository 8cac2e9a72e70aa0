"""A thin client on plain dicts: what the operator needs, and nothing else."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client import ApiClient

from lmcache_operator import metrics
from lmcache_operator.errors import ApiError, NoAnswerError, RefusedError, UnavailableError
from lmcache_operator.kube.shallow import loads
from lmcache_operator.kube.watch import configuration
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import BY_NAME, EVENT, POD, Kind
from lmcache_operator.specs.merge import at
from lmcache_operator.specs.names import FIELD_MANAGER, digest

_SECONDS = 30.0
"""For one request."""
_MAX_REQUESTS = 64
"""At the same time."""
_MIN_WRITE_SECONDS = 5.0
"""A write is given that long at least, and not sent where so much is not left of the right to write."""
_MAX_EVENT_MESSAGE = 1024
_READS = frozenset({"GET"})
_UNAVAILABLE_STATUSES = frozenset({408, 409, 429})
_FORCE = {"fieldManager": FIELD_MANAGER, "force": "true"}
_NOT_SENT = "not sent: this operator does not lead, or cannot renew its lease"
# The client would turn a body of exactly this type into ASCII itself.
_APPLY_PATCH = "application/apply-patch+yaml; charset=utf-8"
# What YAML reads otherwise than JSON: line breaks and what it calls unprintable, and halves of pairs.
_ESCAPED_IN_YAML = {
    code: f"\\u{code:04x}"
    for code in (*range(0x7F, 0xA0), 0x2028, 0x2029, *range(0xD800, 0xE000), 0xFEFF, 0xFFFE, 0xFFFF)
}


Fence = Callable[[], float]
"""For how many seconds from now on this operator may write."""


@asynccontextmanager
async def connect(fence: Fence = lambda: math.inf) -> AsyncIterator[KubeApi]:
    """A client for the cluster that the operator is configured for; it writes only within the fence."""

    class Request(aiohttp.ClientRequest):
        """Looks once more when there is a connection: a process may be frozen at any time, and thaw."""

        async def send(self, conn: Any) -> aiohttp.ClientResponse:
            if self.method not in _READS and fence() < _MIN_WRITE_SECONDS:
                raise aiohttp.ClientError(_NOT_SENT)
            return await super().send(conn)

    server = await configuration()
    server.connection_pool_maxsize = _MAX_REQUESTS
    server.client_session_kwargs = {"request_class": Request}
    async with ApiClient(server) as client:
        yield KubeApi(client, fence)


class KubeApi:
    """Calls to the API server. All of them raise ApiError, and all of them may be repeated."""

    def __init__(self, client: ApiClient, fence: Fence = lambda: math.inf) -> None:
        self._client = client
        self._fence = fence
        self._slots = asyncio.Semaphore(_MAX_REQUESTS)
        self._writes = set[asyncio.Task[Any]]()

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """An object, or None if there is none. What belongs to no namespace is in the one without a name."""
        status, found = await self._call("GET", _path(kind, namespace, name), accept=(HTTPStatus.NOT_FOUND,))
        return found if status == HTTPStatus.OK else None

    async def serves(self, kind: Kind) -> bool:
        """Whether the API server knows this kind: it learns of a definition seconds after it was made."""
        status, found = await self._call("GET", _root(kind), accept=(HTTPStatus.NOT_FOUND,))
        return status == HTTPStatus.OK and any(item["name"] == kind.plural for item in found["resources"])

    async def find(self, kind: Kind, namespace: str, **selectors: str) -> list[Object]:
        """All objects of a kind that a ``labelSelector``, or a ``fieldSelector``, selects."""
        _, page = await self._call("GET", _path(kind, namespace), query=selectors)
        found: list[Object] = page["items"]
        return found

    async def is_ending(self, namespace: str) -> bool:
        """Whether a namespace is being deleted; nothing can be made in it then."""
        accept = (HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN)
        status, found = await self._call("GET", f"/api/v1/namespaces/{namespace}", accept=accept)
        return status == HTTPStatus.OK and "deletionTimestamp" in found["metadata"]

    async def apply(self, wanted: Object, uid: str | None) -> None:
        """Server-side apply: the fields of ``wanted`` become ours, and those we no longer name are given up.

        ``uid`` is that of the object to change, None to make a new one: one that appeared or was replaced in
        between is left alone, by 409 or 422.
        """
        # No object has the resource version 1, and to one that doesn't exist it does not matter.
        condition = {"resourceVersion": "1"} if uid is None else {"uid": uid}
        body = wanted | {"metadata": wanted["metadata"] | condition}
        await self._call("PATCH", _path_of(wanted), body, query=_FORCE)

    async def apply_status(self, wanted: Object) -> None:
        """The same for the status; nothing happens if the object is gone."""
        gone = (HTTPStatus.NOT_FOUND,)
        await self._call("PATCH", f"{_path_of(wanted)}/status", wanted, query=_FORCE, accept=gone)

    async def create(self, kind: Kind, wanted: Object) -> Object | None:
        """The object as stored; None if there is one of this name."""
        accept = (HTTPStatus.CONFLICT,)
        path = _path(kind, wanted["metadata"]["namespace"])
        status, stored = await self._call("POST", path, wanted, accept=accept)
        return None if status in accept else stored

    async def replace(self, kind: Kind, changed: Object) -> Object | None:
        """The object as stored; None if it was changed, or has gone, since it was read."""
        accept, metadata = (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT), changed["metadata"]
        path = _path(kind, metadata["namespace"], metadata["name"])
        status, stored = await self._call("PUT", path, changed, accept=accept)
        return None if status in accept else stored

    async def settle(self) -> None:
        """Wait for the answers to all writes; those of cancelled callers go on until then."""
        if self._writes:
            await asyncio.wait(self._writes)

    async def delete(
        self, kind: Kind, namespace: str, name: str, uid: str, *, grace_seconds: int | None = None
    ) -> bool:
        """Delete this object and what it owns. False if it is gone already, or another has its name.

        ``grace_seconds``: for a pod, None: its own; 0 waits for no kubelet.
        """
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        accept = (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT)
        status, _ = await self._call("DELETE", _path(kind, namespace, name), body, accept=accept)
        return status not in accept

    async def evict(self, namespace: str, pod: str, uid: str) -> bool:
        """Ask for a pod's eviction. False if a disruption budget forbids it at present, or it is gone."""
        options, metadata = {"preconditions": {"uid": uid}}, {"name": pod, "namespace": namespace}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata, "deleteOptions": options}
        path = f"{_path(POD, namespace, pod)}/eviction"
        accept = (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS)
        status, _ = await self._call("POST", path, body, accept=accept)
        return status not in accept

    async def annotate(self, pod: Object, annotations: Mapping[str, str]) -> None:
        """Server-side apply of all annotations that we have on a pod; another one of its name is refused."""
        await self._apply_to_pod(pod, "", {}, annotations=annotations)

    async def resize(self, pod: Object, init_container: str, resources: Mapping[str, Any]) -> None:
        """Ask for other resources of a pod that runs; its kubelet answers in the pod's status.

        Raises RefusedError where other containers would get other limits with it: the API server gives those
        without the ones of a LimitRange that came after the pod, and an engine could be killed for it.
        """
        spec = {"initContainers": [{"name": init_container, "resources": resources}]}
        found = await self._apply_to_pod(pod, "/resize", {"spec": spec}, dry_run=True)
        before, after = (_limits_of_others(one, init_container) for one in (pod, found))
        if changed := [name for name, limits in after.items() if limits != before.get(name)]:
            what = f"a LimitRange of the namespace would limit container {changed[0]} of the running pod, too"
            raise RefusedError("resize", f"{what}: replace the pod, or give that container limits")
        await self._apply_to_pod(pod, "/resize", {"spec": spec})

    async def _apply_to_pod(
        self, pod: Object, subresource: str, body: Object, *, dry_run: bool = False, **metadata: Any
    ) -> Object:
        name, namespace, uid = (pod["metadata"][key] for key in ("name", "namespace", "uid"))
        header: Object = {"apiVersion": POD.api_version, "kind": POD.kind}
        header["metadata"] = {"name": name, "namespace": namespace, "uid": uid, **metadata}
        path, query = f"{_path(POD, namespace, name)}{subresource}", {"dryRun": "All"} if dry_run else {}
        _, stored = await self._call("PATCH", path, header | body, query=_FORCE | query)
        return cast(Object, stored)

    async def post_event(self, about: Object, kind: str, reason: str, message: str, now: datetime) -> None:
        """Report something about a cluster where ``kubectl describe`` and ``kubectl events`` show it.

        What was reported in the same words before is counted up.
        """
        metadata, time = about["metadata"], now.strftime("%Y-%m-%dT%H:%M:%SZ")
        involved = {key: metadata[key] for key in ("name", "namespace", "uid")}
        name = f"{metadata['name']}.{digest([metadata['uid'], kind, reason, message])}"
        before = await self.get(EVENT, metadata["namespace"], name) or {}
        body = {
            "apiVersion": EVENT.api_version, "kind": EVENT.kind, "type": kind, "reason": reason,
            "metadata": {"name": name, "namespace": metadata["namespace"]},
            "involvedObject": {"apiVersion": about["apiVersion"], "kind": about["kind"], **involved},
            "message": message[:_MAX_EVENT_MESSAGE], "source": {"component": FIELD_MANAGER},
            "count": (before.get("count") or 0) + 1,
            "firstTimestamp": before.get("firstTimestamp") or time, "lastTimestamp": time,
        }  # fmt: skip
        await self._call("PATCH", _path(EVENT, metadata["namespace"], name), body, query=_FORCE)

    async def _call(
        self,
        verb: str,
        path: str,
        body: Object | None = None,
        *,
        query: Mapping[str, str] | None = None,
        accept: tuple[int, ...] = (),
    ) -> tuple[int, Any]:
        """One request: its status and its answer. Raises ApiError for failures that are not in ``accept``."""
        headers = {"Content-Type": _APPLY_PATCH if verb == "PATCH" else "application/json"}
        content = apply_patch(body) if verb == "PATCH" else body
        path = f"{path}?{urlencode(query)}" if query else path
        # Without the body, which is plain already: the client would walk through all of it.
        method, url, headers, *_ = await self._client.param_serialize(
            verb, path, header_params=headers, auth_settings=["BearerToken"]
        )
        exchange = asyncio.create_task(self._exchange(method, url, headers, content))
        if verb not in _READS:
            # Nobody may lead next while a write is on its way: who is cancelled leaves it to `settle`.
            self._writes.add(exchange)
            exchange.add_done_callback(self._writes.discard)
        status, data = await (exchange if verb in _READS else asyncio.shield(exchange))
        metrics.API_REQUESTS.labels(verb=verb, code=str(status)).inc()
        if status not in accept and not HTTPStatus.OK <= status < HTTPStatus.BAD_REQUEST:
            raise error_of(f"{verb} {path}", status, data)
        return status, loads(data) if status < HTTPStatus.BAD_REQUEST else None

    async def _exchange(
        self, method: str, url: str, headers: Mapping[str, str], content: Any
    ) -> tuple[int, bytes]:
        """A request and its answer; status 0: there is none."""
        try:
            async with self._slots:
                seconds = _SECONDS if method in _READS else min(_SECONDS, self._fence())
                if seconds < _MIN_WRITE_SECONDS:
                    raise aiohttp.ClientError(_NOT_SENT)
                response = await self._client.call_api(
                    method, url, headers, content, _request_timeout=seconds
                )
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return 0, f"no answer: {error or type(error).__name__}".encode()


def _limits_of_others(pod: Object, init_container: str) -> dict[str, Any]:
    containers = [own for kind in ("containers", "initContainers") for own in at(pod, "spec", kind) or ()]
    return {
        own["name"]: (own.get("resources") or {}).get("limits")
        for own in containers
        if own["name"] != init_container
    }


def error_of(what: str, status: int, body: bytes) -> ApiError:
    """The error that an answer stands for: ``what`` names the call, status 0 is no answer."""
    try:
        answer = json.loads(body)
        message, is_explained = answer["message"], "reason" in answer
    except (ValueError, KeyError, TypeError):
        message, is_explained = body[:200].decode(errors="replace") or f"HTTP {status}", True
        if status == HTTPStatus.NOT_FOUND:  # an object that is missing is explained
            needed = (
                "cert-manager" if "cert-manager" in what else "a newer Kubernetes, or the chart's definitions"
            )
            message = f"the API server does not know this kind of object: it needs {needed}"
    if status == 0:
        return NoAnswerError(what, message)
    # Server-side apply answers what does not fit the schema by 500 without a reason.
    is_unavailable = status in _UNAVAILABLE_STATUSES or (status >= 500 and is_explained)
    return (UnavailableError if is_unavailable else RefusedError)(what, message)


def apply_patch(body: Any) -> str:
    """Plain data as JSON that YAML reads the same: JSON may escape surrogate pairs, YAML knows none."""
    return json.dumps(body, ensure_ascii=False).translate(_ESCAPED_IN_YAML)


def _path_of(wanted: Object) -> str:
    return _path(BY_NAME[wanted["kind"]], wanted["metadata"]["namespace"], wanted["metadata"]["name"])


def _path(kind: Kind, namespace: str, name: str | None = None) -> str:
    root = _root(kind)
    collection = f"{root}/namespaces/{namespace}/{kind.plural}" if namespace else f"{root}/{kind.plural}"
    return f"{collection}/{name}" if name else collection


def _root(kind: Kind) -> str:
    return f"/apis/{kind.group}/{kind.version}" if kind.group else f"/api/{kind.version}"
