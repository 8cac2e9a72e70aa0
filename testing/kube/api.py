"""A small client of the Kubernetes API on plain dicts, for tests, the demo and benchmarks."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
import time
import urllib.parse
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

T = TypeVar("T")
Object = dict[str, Any]
FIELD_MANAGER = "tools-kube"
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
PATIENCE = 300.0
"""Seconds. An idle machine needs a few; a busy one must not fail a test."""
_SECONDS = 120.0
"""Seconds to wait for an answer: a slow machine must not fail a test."""
_MIN_PAUSE, _MAX_PAUSE = 0.02, 0.2
_idle: defaultdict[tuple[str, Path], list[http.client.HTTPSConnection]] = defaultdict(list)
"""Open connections by API server, which a new request may use. A handshake costs more than most requests."""


class ApiError(RuntimeError):
    """The API server refused a request. `code` is the HTTP status, and the message is the server's own."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


def manifests(*paths: Path) -> list[Object]:
    """All objects in YAML files."""
    return [obj for path in paths for obj in yaml.safe_load_all(path.read_text()) if obj]


def wait_for(
    condition: Callable[[], T | None], timeout: float = PATIENCE, interval: float | None = None
) -> T:
    """Poll until ``condition`` returns a true value. `ApiError` 404 and 5xx and missing answers are retried.

    Pauses have ``interval`` seconds, or grow to a tenth of the time that has passed. Raises TimeoutError with
    the last value or error.
    """
    begin = time.monotonic()
    while True:
        last: object
        try:
            value = condition()
            if value:
                return value
            last = value
        except (ApiError, OSError) as error:
            if isinstance(error, ApiError) and error.code != 404 and error.code < 500:
                raise
            last = error
        seconds = time.monotonic() - begin
        if seconds > timeout:
            raise TimeoutError(f"not within {timeout:g} s; last: {last!r}")
        time.sleep(interval or min(max(seconds / 10, _MIN_PAUSE), _MAX_PAUSE))


def close_idle_connections() -> None:
    """Close the connections that no request uses. Later requests open new ones."""
    for connections in _idle.values():
        while connections:
            connections.pop().close()


@dataclass(frozen=True)
class Api:
    """Access of one user to an API server."""

    url: str
    ca: Path
    token: str

    def request(
        self, method: str, path: str, body: Object | None = None, content_type: str = "application/json"
    ) -> Any:
        """The decoded JSON of the answer, or its text. Raises `ApiError`, or OSError without an answer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": content_type}
        status, text = self._exchange(method, path, data, headers)
        with_message = text.startswith("{")
        if status >= 400:
            raise ApiError(status, json.loads(text)["message"] if with_message else text)
        return json.loads(text) if with_message else text

    def _exchange(
        self, method: str, path: str, data: bytes | None, headers: dict[str, str]
    ) -> tuple[int, str]:
        """Send a request on an idle connection or on a new one. Returns the status and the body."""
        idle = _idle[self.url, self.ca]
        # A server that was restarted has closed its idle connections.
        with contextlib.suppress(IndexError, ConnectionError, ssl.SSLEOFError):
            return self._answer(idle.pop(), method, path, data, headers)
        context = ssl.create_default_context(cafile=str(self.ca))
        host = urllib.parse.urlsplit(self.url).netloc
        connection = http.client.HTTPSConnection(host, context=context, timeout=_SECONDS)
        return self._answer(connection, method, path, data, headers)

    def _answer(
        self, connection: http.client.HTTPSConnection, method: str, path: str, data: bytes | None,
        headers: dict[str, str],
    ) -> tuple[int, str]:  # fmt: skip
        try:
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            status, text = answer.status, answer.read().decode()
        except BaseException:
            connection.close()
            raise
        _idle[self.url, self.ca].append(connection)
        return status, text

    def path(self, kind: str, namespace: str | None = None, name: str = "") -> str:
        """The path of a resource. ``kind`` is for example ``v1/pods`` or ``apps/v1/statefulsets``."""
        group_version, _, plural = kind.rpartition("/")
        prefix = f"/apis/{group_version}" if "/" in group_version else f"/api/{group_version}"
        parts = [prefix, *(["namespaces", namespace] if namespace else []), plural, *([name] if name else [])]
        return "/".join(parts)

    def get(self, kind: str, name: str, namespace: str | None = None) -> Any:
        return self.request("GET", self.path(kind, namespace, name))

    def find(self, kind: str, name: str, namespace: str | None = None) -> Object | None:
        """The object, or None if it does not exist."""
        try:
            obj: Object = self.get(kind, name, namespace)
        except ApiError as error:
            if error.code != 404:
                raise
            return None
        return obj

    def objects(self, kind: str, namespace: str | None = None, selector: str = "") -> list[Object]:
        query = f"?labelSelector={urllib.parse.quote(selector)}" if selector else ""
        items: list[Object] = self.request("GET", self.path(kind, namespace) + query)["items"]
        return items

    def create(self, kind: str, obj: Object, namespace: str | None = None) -> Any:
        return self.request("POST", self.path(kind, namespace), obj)

    def apply(self, kind: str, obj: Object, namespace: str | None = None) -> Any:
        """Apply the object server-side, with force."""
        path = self.path(kind, namespace, obj["metadata"]["name"])
        return self.request("PATCH", f"{path}?fieldManager={FIELD_MANAGER}&force=true", obj, APPLY)

    def patch(self, kind: str, name: str, patch: Object, namespace: str | None = None) -> Any:
        """Apply a merge patch. ``name`` may include a subresource, as in ``x/status``."""
        return self.request("PATCH", self.path(kind, namespace, name), patch, MERGE)

    def delete(self, kind: str, name: str, namespace: str | None = None) -> None:
        """Delete the object without waiting. Dependents are collected in the background."""
        self.request("DELETE", self.path(kind, namespace, name) + "?propagationPolicy=Background")
