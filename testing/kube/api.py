"""A small client of the Kubernetes API on plain dicts, for tests, the demo and benchmarks."""

from __future__ import annotations

import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
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
"""Seconds. If a pod is recreated before the disruption controller has seen its eviction, it counts as
disrupted for two more minutes, and no other pod of its budget can be evicted until then."""
_SECONDS = 120.0
"""Seconds to wait for an answer: a slow machine must not fail a test."""


class ApiError(RuntimeError):
    """The API server refused a request. `code` is the HTTP status, and the message is the server's own."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


def manifests(*paths: Path) -> list[Object]:
    """All objects in YAML files."""
    return [obj for path in paths for obj in yaml.safe_load_all(path.read_text()) if obj]


def wait_for(condition: Callable[[], T | None], timeout: float = PATIENCE, interval: float = 0.02) -> T:
    """Poll until ``condition`` returns a true value. `ApiError` 404 and 5xx and missing answers are retried.

    Raises TimeoutError with the last value or error.
    """
    deadline = time.monotonic() + timeout
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
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout:g} s; last: {last!r}")
        time.sleep(interval)


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
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": content_type},
        )
        context = ssl.create_default_context(cafile=str(self.ca))
        try:
            with urllib.request.urlopen(request, context=context, timeout=_SECONDS) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            text = error.read().decode()
            with_message = text.startswith("{")
            raise ApiError(error.code, json.loads(text)["message"] if with_message else text) from None
        return json.loads(text) if text.startswith("{") else text

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
