"""A thin client for the API server on plain dicts, limited to the calls that the operator needs."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client import ApiClient
from multidict import CIMultiDict, CIMultiDictProxy

from lmcache_operator import metrics
from lmcache_operator.errors import RefusedError, UnavailableError
from lmcache_operator.kube.fence import WriteFence
from lmcache_operator.kube.patches import APPLY_PATCH, apply_patch
from lmcache_operator.kube.refusals import (
    TooLargeError,
    bounded,
    error_of,
    no_answer,
    parsed,
    warning_of,
    with_field,
)
from lmcache_operator.kube.watch import configuration
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import BY_NAME, EVENT, POD, Kind
from lmcache_operator.specs.merge import dig
from lmcache_operator.specs.names import FIELD_MANAGER, digest

_SECONDS = 30.0
"""Timeout of one request."""
_MAX_REQUESTS = 64
"""Maximum number of concurrent requests."""
_MIN_WRITE_SECONDS = 5.0
"""Minimum timeout of a write. A write is not sent if the operator's right to write ends sooner."""
_MAX_EVENT_MESSAGE = 1024
_MAX_BYTES = 8 << 20
"""Largest answer to a review or a dry run."""
_MAX_LISTS, _PAGE_BYTES, _PAGE_OBJECTS = 4, 4 << 20, 100
"""Concurrent lists, and the bounds of a page. A page with a single object has no bound."""
_LIST_SECONDS, _PART_BYTES = 30.0, 16 << 20
"""Bounds of a list: time for all pages, and size of the parts of all objects as JSON."""
_TOO_LARGE = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
"""Stands for an answer that was larger than its limit. The API server never answers a read with it."""
_READS = frozenset({"GET"})
_FORCE = {"fieldManager": FIELD_MANAGER, "force": "true"}
_NOT_SENT = "not sent: this operator does not lead, or cannot renew its lease"
_NO_FENCE = WriteFence()


@asynccontextmanager
async def connect(fence: WriteFence = _NO_FENCE, context: str | None = None) -> AsyncIterator[KubeApi]:
    """Connect to the configured Kubernetes cluster. The client writes only while the fence allows it.

    Args:
        fence: see `WriteFence`.
        context: context of the kubeconfig; None: the present one.
    """

    class Request(aiohttp.ClientRequest):
        """Checks the fence again when it writes to the connection.

        The process may have been frozen since the first check. All requests but reads have a body. aiohttp
        sends the headers together with the body, in a task of its own that may start later.
        """

        async def write_bytes(self, writer: Any, conn: Any, content_length: int | None = None) -> None:
            if self.method not in _READS and fence.seconds_left(str(self.url)) < _MIN_WRITE_SECONDS:
                conn.protocol.set_exception(aiohttp.ClientError(_NOT_SENT))
                conn.close()
                return
            await super().write_bytes(writer, conn, content_length)

    server = await configuration(context)
    server.connection_pool_maxsize = _MAX_REQUESTS
    # Pods answer through the API server, and a cookie of one pod would be sent to the others.
    server.client_session_kwargs = {"request_class": Request, "cookie_jar": aiohttp.DummyCookieJar()}
    async with ApiClient(server) as client:
        yield KubeApi(client, fence)


class KubeApi:
    """Calls to the API server. All calls may raise ApiError, and all are safe to repeat."""

    def __init__(self, client: ApiClient, fence: WriteFence = _NO_FENCE) -> None:
        self._client = client
        self._fence = fence
        self._slots, self._lists = asyncio.Semaphore(_MAX_REQUESTS), asyncio.Semaphore(_MAX_LISTS)
        self._writes = set[asyncio.Task[Any]]()

    @property
    def server(self) -> str:
        """URL of the API server."""
        return str(self._client.configuration.host)

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """Read an object; None if it does not exist. Cluster-scoped objects have the namespace ""."""
        status, answer = await self._call("GET", _path(kind, namespace, name), accept=(HTTPStatus.NOT_FOUND,))
        return answer if status == HTTPStatus.OK else None

    async def serves(self, kind: Kind) -> bool:
        """Whether the API server serves a kind. It does so seconds after the definition was created."""
        status, answer = await self._call("GET", _root(kind), accept=(HTTPStatus.NOT_FOUND,))
        return status == HTTPStatus.OK and any(item["name"] == kind.plural for item in answer["resources"])

    async def find(
        self,
        kind: Kind,
        namespace: str,
        part: Callable[[Object], Object] | None = None,
        /,
        **selectors: str,
    ) -> list[Object]:
        """Read ``part`` of all objects of a kind that a ``labelSelector`` or a ``fieldSelector`` matches.

        Users choose the number and the sizes of objects, so the size of a page is bounded. A larger page is
        read again with fewer objects. Time and parts are bounded, too: raises UnavailableError.
        """
        objects, limit, place, num_bytes = list[Object](), _PAGE_OBJECTS, dict[str, str](), 0
        async with self._lists:
            deadline = time.monotonic() + _LIST_SECONDS
            while True:
                status, page = await self._call(
                    "GET", _path(kind, namespace), query={**selectors, "limit": str(limit), **place},
                    accept=(_TOO_LARGE,), max_bytes=_PAGE_BYTES if limit > 1 else math.inf,
                )  # fmt: skip
                if status == _TOO_LARGE:
                    limit //= 10
                    continue
                items = with_field("items", page)["items"]
                parts = list(map(part, items)) if part else items
                num_bytes += len(json.dumps(parts))
                objects += parts
                if num_bytes > _PART_BYTES or time.monotonic() > deadline:
                    problem = "its objects are too many or too large: delete some of them"
                    raise UnavailableError(f"list {kind.plural} of namespace {namespace}", problem)
                if not (following := dig(page, "metadata", "continue")):
                    return objects
                place = {"continue": following}

    async def is_ending(self, namespace: str) -> bool:
        """Whether a namespace is terminating, so that no object can be created in it."""
        accept = (HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN)
        status, answer = await self._call("GET", f"/api/v1/namespaces/{namespace}", accept=accept)
        return status == HTTPStatus.OK and "deletionTimestamp" in answer["metadata"]

    async def apply(self, wanted: Object, uid: str | None) -> None:
        """Server-side apply: take ownership of the fields in ``wanted``, and release all other fields.

        ``uid``: the object to change, or None to create one. If an object was created or replaced meanwhile,
        the API server refuses the call with 409 or 422.
        """
        # No existing object has resource version 1, and for a new object the API server ignores the version.
        condition = {"resourceVersion": "1"} if uid is None else {"uid": uid}
        body = wanted | {"metadata": wanted["metadata"] | condition}
        await self._call("PATCH", _path_of(wanted), body, query=_FORCE)

    async def apply_status(self, wanted: Object, manager: str = FIELD_MANAGER) -> Object | None:
        """Server-side apply of the status. Returns the object, or None if it no longer exists."""
        path, query = f"{_path_of(wanted)}/status", _FORCE | {"fieldManager": manager}
        answer = await self._call("PATCH", path, wanted, query=query, accept=(HTTPStatus.NOT_FOUND,))
        return cast(Object | None, answer[1])

    async def create(self, kind: Kind, wanted: Object) -> Object | None:
        """Create an object. Returns it as stored, or None if the name is taken."""
        path = _path(kind, wanted["metadata"]["namespace"])
        answer = await self._call("POST", path, wanted, accept=(HTTPStatus.CONFLICT,))
        return cast(Object | None, answer[1])

    async def replace(self, kind: Kind, changed: Object) -> Object | None:
        """Replace an object. Returns it as stored, or None if it was changed or deleted since it was read."""
        accept, metadata = (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT), changed["metadata"]
        path = _path(kind, metadata["namespace"], metadata["name"])
        status, stored = await self._call("PUT", path, changed, accept=accept)
        return None if status in accept else stored

    async def read(self, path: str, *, seconds: float, max_bytes: int) -> tuple[int, bytes]:
        """Read any path. Returns the status and the body; status 0: no answer, and the reason.

        Pods are not trusted: a redirect would send a request elsewhere with the user's rights.
        """
        async with self._slots:
            return (await self._request(path, seconds, max_bytes, allow_redirects=False))[:2]

    async def ask(self, path: str, body: Object, *, seconds: float) -> tuple[int, bytes, list[str]]:
        """Send a review or a dry run, which stores no object. Returns what `read` returns, and warnings."""
        status, answer, headers = await self._request(path, seconds, method="POST", json=body)
        return status, answer, [warning_of(header) for header in headers.getall("Warning", ())]

    async def date(self, *, seconds: float) -> str:
        """Return the header Date of an answer of the API server; empty without an answer."""
        return str((await self._request("/version", seconds))[2].get("Date", ""))

    async def _request(
        self, path: str, seconds: float, max_bytes: int = _MAX_BYTES, *, method: str = "GET", **more: Any
    ) -> tuple[int, bytes, CIMultiDictProxy[str]]:
        """Return status, body and headers of an answer; status 0: no answer, and the reason."""
        pool, url, options = await self._unlimited_get(path)
        answer = 0, b"", CIMultiDictProxy(CIMultiDict[str]())
        try:
            async with asyncio.timeout(seconds):
                while True:
                    async with pool.request(method, url, **options, **more) as response:
                        answer = response.status, await bounded(response.content, max_bytes), response.headers
                    if response.status != HTTPStatus.TOO_MANY_REQUESTS:
                        return answer
                    await asyncio.sleep(1.0)  # the API server is busy, and asks for this pause
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return answer if answer[0] else (0, no_answer(error, seconds), answer[2])

    @asynccontextmanager
    async def web_socket(
        self, path: str, protocol: str, *, seconds: float
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """Open a web socket, such as a port-forward. Raises aiohttp.ClientError, OSError or TimeoutError."""
        pool, url, options = await self._unlimited_get(path)
        async with asyncio.timeout(seconds):
            socket = await pool.ws_connect(url, protocols=(protocol,), **options)
        try:
            yield socket
        finally:
            await socket.close()

    async def _unlimited_get(self, path: str) -> tuple[aiohttp.ClientSession, str, dict[str, Any]]:
        """Return the connections, URL and options for a GET whose answer has no time limit."""
        _, url, headers, *_ = await self._client.param_serialize(
            "GET", path, header_params={}, auth_settings=["BearerToken"]
        )
        rest = self._client.rest_client
        rest.pool_manager = rest.pool_manager or rest._create_pool_manager()
        options = {"headers": headers, "proxy": rest.proxy, "proxy_headers": rest.proxy_headers}
        if name := rest.configuration.tls_server_name:
            options["server_hostname"] = name
        return rest.pool_manager, url, options

    async def settle(self) -> None:
        """Wait for the answers to all pending writes, including those of cancelled callers."""
        if self._writes:
            await asyncio.wait(self._writes)

    async def delete(
        self, kind: Kind, namespace: str, name: str, uid: str,
        *, grace_seconds: int | None = None, **more: str,
    ) -> bool:  # fmt: skip
        """Delete an object and its dependents. False if it does not exist, or another object has its name.

        ``grace_seconds``: grace period of a pod; None: its own; 0: at once. ``more``: further preconditions.
        """
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid, **more}}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        accept = (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT)
        status, _ = await self._call("DELETE", _path(kind, namespace, name), body, accept=accept)
        return status not in accept

    async def evict(self, namespace: str, pod: str, uid: str) -> bool:
        """Evict a pod. False if a disruption budget forbids it at present, or the pod no longer exists."""
        options, metadata = {"preconditions": {"uid": uid}}, {"name": pod, "namespace": namespace}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata, "deleteOptions": options}
        path = f"{_path(POD, namespace, pod)}/eviction"
        accept = (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS)
        status, _ = await self._call("POST", path, body, accept=accept)
        return status not in accept

    async def annotate(self, pod: Object, annotations: Mapping[str, str]) -> None:
        """Server-side apply of all annotations that the operator owns on a pod. Refused for another uid."""
        await self._apply_to_pod(pod, "", {}, annotations=annotations)

    async def resize(self, pod: Object, init_container: str, resources: Mapping[str, Any]) -> None:
        """Ask for an in-place resize of a running pod. The kubelet answers in the pod's status.

        Raises:
            RefusedError: the limits of another container would change, too. The API server adds the defaults
                of a LimitRange that is newer than the pod, and the kernel could then kill the engine.
        """
        spec = {"initContainers": [{"name": init_container, "resources": resources}]}
        resized = await self._apply_to_pod(pod, "/resize", {"spec": spec}, dry_run=True)
        before, after = (_limits_except(each, init_container) for each in (pod, resized))
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
        """Post an Event about an object. A repeated Event only increases the count of the former one."""
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
        max_bytes: float = math.inf,
    ) -> tuple[int, Any]:
        """Send one request. Returns its HTTP status and answer. `_TOO_LARGE`: it has more than ``max_bytes``.

        Raises:
            ApiError: the request failed with a status that is not in ``accept``.
        """
        headers = {"Content-Type": APPLY_PATCH if verb == "PATCH" else "application/json"}
        content = apply_patch(body) if verb == "PATCH" else body
        path = f"{path}?{urlencode(query)}" if query else path
        # The body is passed later, because the client would convert all of it, and it is plain data already.
        method, url, headers, *_ = await self._client.param_serialize(
            verb, path, header_params=headers, auth_settings=["BearerToken"]
        )
        exchange = asyncio.create_task(self._exchange(method, url, headers, content, max_bytes))
        if verb not in _READS:
            # The Lease must not be released while a write is pending, so `settle` waits for cancelled writes.
            self._writes.add(exchange)
            exchange.add_done_callback(self._writes.discard)
            # `shield` no longer reads an exception of the fence once the caller is cancelled.
            exchange.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        status, data = await (exchange if verb in _READS else asyncio.shield(exchange))
        metrics.API_REQUESTS.labels(verb=verb, code=str(status)).inc()
        if status not in accept and not HTTPStatus.OK <= status < HTTPStatus.BAD_REQUEST:
            raise error_of(f"{verb} {path}", status, data)
        return status, parsed(f"{verb} {path}", data) if status < HTTPStatus.BAD_REQUEST else None

    async def _exchange(
        self, method: str, url: str, headers: Mapping[str, str], content: Any, max_bytes: float
    ) -> tuple[int, bytes]:
        """Send a request. Returns its status and body; status 0: no answer."""
        seconds = _SECONDS
        try:
            async with self._slots:
                if method not in _READS:
                    await self._fence.renew(url)
                    if (seconds := min(_SECONDS, self._fence.seconds_left(url))) < _MIN_WRITE_SECONDS:
                        raise aiohttp.ClientError(_NOT_SENT)
                answer = await self._client.call_api(method, url, headers, content, _request_timeout=seconds)
                async with answer.response as response:
                    return response.status, await bounded(response.content, max_bytes)
        except TooLargeError:
            return _TOO_LARGE, b""
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return 0, no_answer(error, seconds)


def _limits_except(pod: Object, init_container: str) -> dict[str, Any]:
    containers = [item for kind in ("containers", "initContainers") for item in dig(pod, "spec", kind) or ()]
    return {
        item["name"]: (item.get("resources") or {}).get("limits")
        for item in containers
        if item["name"] != init_container
    }


def _path_of(wanted: Object) -> str:
    return _path(BY_NAME[wanted["kind"]], wanted["metadata"]["namespace"], wanted["metadata"]["name"])


def _path(kind: Kind, namespace: str, name: str | None = None) -> str:
    root = _root(kind)
    collection = f"{root}/namespaces/{namespace}/{kind.plural}" if namespace else f"{root}/{kind.plural}"
    return f"{collection}/{name}" if name else collection


def _root(kind: Kind) -> str:
    return f"/apis/{kind.group}/{kind.version}" if kind.group else f"/api/{kind.version}"
