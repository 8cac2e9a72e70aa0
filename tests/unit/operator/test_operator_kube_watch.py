"""Responses of the API server as kopf sees them: only metadata, also of very deep objects."""

import asyncio
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import kopf
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from lmcache_operator import metrics
from lmcache_operator.kube import refused_reads
from lmcache_operator.kube.shallow import loads
from lmcache_operator.kube.watch import login
from lmcache_operator.specs.names import digest
from lmcache_store.common.backoff import Backoff
from tests.harness.web import answering

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


def nested(levels: int, inner: str) -> str:
    return '{"a":' * levels + inner + "}" * levels


@given(values)
def test_loads_reads_shallow_json_unchanged(value: Any) -> None:
    assert loads(json.dumps(value).encode()) == value


@given(values)
def test_loads_truncates_deep_values_and_keeps_their_neighbours(value: Any) -> None:
    text = json.dumps(value)
    parsed = loads(f'[{text},{nested(5000, text)},{{"x":{text}}},{nested(3000, text)}]'.encode())
    assert (parsed[0], parsed[2]) == (value, {"x": value})
    for item in (parsed[1], parsed[3]):
        levels = 0
        while item is not None:
            item, levels = item["a"], levels + 1
        assert 100 < levels < 500


OWNER = {"kind": "LMCacheCluster", "name": "c", "uid": "v", "controller": True}
METADATA = {
    "name": "n", "namespace": "s", "uid": "u", "resourceVersion": "7",
    "labels": {"app.kubernetes.io/managed-by": "lmcache-operator"}, "ownerReferences": [OWNER],
}  # fmt: skip
DEEP = '{"kind":"PartialObjectMetadata","metadata":{"managedFields":' + nested(3000, "1") + ',"name":"deep"}}'
HUGE = {"kind": "PartialObjectMetadata", "metadata": "x" * 10}
MANY: dict[str, Any] = {
    "annotations": HUGE, "labels": METADATA["labels"] | HUGE, "ownerReferences": [{"name": "other"}, OWNER],
}  # fmt: skip
WHOLE = {"kind": "PartialObjectMetadata", "metadata": METADATA | MANY}
SLIM = METADATA | {"annotations": {"digest": digest(HUGE)}}


def write_kubeconfig(url: str) -> None:
    context = {"name": "x", "context": {"cluster": "x", "user": "x"}}
    users, clusters = {"name": "x", "user": {"token": "t"}}, {"name": "x", "cluster": {"server": url}}
    config = {"current-context": "x", "contexts": [context], "users": [users], "clusters": [clusters]}
    Path(os.environ["KUBECONFIG"]).write_text(json.dumps(config))


async def fetch(
    path: str, body: str, use: Callable[[aiohttp.ClientResponse], Any], *refusals: int
) -> tuple[Any, str]:
    """Return the result of `use` for a response with this body, and the requested formats.

    ``refusals``: statuses of the first responses.
    """
    accepted, statuses = [], iter(refusals)

    async def handle(request: web.Request) -> web.Response:
        accepted.append(request.headers["Accept"])
        if status := next(statuses, None):
            return web.json_response({"reason": "no", "message": "things are forbidden"}, status=status)
        return web.Response(text=body, content_type="application/json")

    async with answering(handle) as url:
        write_kubeconfig(url)
        connection = await login(settings=kopf.OperatorSettings())
        assert connection is not None
        async with connection.aiohttp_session as session, session.get(url + path) as response:
            return await use(response), accepted[0]


@pytest.fixture(autouse=True)
def _kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))


def test_list_returns_needed_metadata_also_with_a_deep_item() -> None:
    body = f'{{"kind":"PartialObjectMetadataList","items":[{DEEP},{json.dumps(WHOLE)}]}}'
    answer, accepted = asyncio.run(fetch("/apis/a/v1/things?limit=5", body, lambda r: r.json()))
    assert accepted == "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
    assert [item["metadata"] for item in answer["items"]] == [{"name": "deep"}, SLIM]
    empty = '{"kind":"PartialObjectMetadataList","items":null}'
    assert asyncio.run(fetch("/apis/a/v1/things?limit=5", empty, lambda r: r.json()))[0]["items"] == []


def test_watch_returns_needed_metadata_also_after_a_deep_event() -> None:
    status = {"type": "ERROR", "object": {"kind": "Status", "code": 410}}
    lines = [f'{{"type":"ADDED","object":{DEEP}}}', json.dumps({"type": "MODIFIED", "object": WHOLE})]
    body = "\n".join([*lines, json.dumps(status)]) + "\n"

    async def read(response: aiohttp.ClientResponse) -> list[Any]:
        chunks = [chunk async for chunk in response.content.iter_chunked(5)]
        return [json.loads(line) for line in b"".join(chunks).splitlines()]

    events, accepted = asyncio.run(fetch("/apis/a/v1/things?watch=true", body, read))
    deep_event, whole_event, error = events
    assert accepted == "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
    assert deep_event["object"]["metadata"] == {"name": "deep"}
    assert (whole_event["type"], whole_event["object"]["metadata"]) == ("MODIFIED", SLIM)
    assert error == status


@pytest.mark.parametrize("path", ["/apis", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions?limit=5"])
def test_discovery_and_crds_are_returned_unchanged(path: str) -> None:
    body = {"kind": "CustomResourceDefinitionList", "items": [{"spec": {"group": "g"}}]}
    answer, accepted = asyncio.run(fetch(path, json.dumps(body), lambda r: r.json()))
    assert (answer, accepted) == (body, "*/*")


THINGS = "/apis/a/v1/namespaces/lost/things"


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refused_reads, "_BACKOFF", Backoff(0.0, 0.0))


@pytest.mark.parametrize(
    ("path", "namespace"), [(THINGS, "lost"), ("/prefix" + THINGS, "lost"), ("/apis/a/v1/things", "*")]
)
@pytest.mark.usefixtures("_at_once")
def test_refused_list_is_reported_once_and_repeated(
    path: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (answer, _) = asyncio.run(
        fetch(f"{path}?limit=5", '{"items": []}', lambda response: response.json(), 403, 404, 403)
    )
    assert answer == {"items": []}
    assert [record.message for record in caplog.records if record.name == refused_reads.__name__] == [
        f"namespace {namespace} is not served: the API server refuses to list things: things are forbidden. "
        "The operator retries",
        f"namespace {namespace} is served again",
    ]


def test_namespace_is_refused_until_all_its_reads_are_allowed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    values = []
    for change, read in [("refuse", "a"), ("refuse", "b"), ("refuse", "b"), ("allow", "b"), ("allow", "c"),
                         ("allow", "a"), ("allow", "a")]:  # fmt: skip
        getattr(refused_reads, change)("ns", read, *(["because"] if change == "refuse" else []))
        values.append(metrics.REFUSED_READS.labels("ns")._value.get())
    assert values == [1, 2, 2, 1, 1, 0, 0]
    assert len(caplog.records) == 2


@pytest.mark.parametrize("status", [403, 404])
def test_refused_watch_has_expired_after_a_wait(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then kopf lists the objects again, and misses no change. A Role may allow the list."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("lmcache_operator.kube.watch.asyncio", SimpleNamespace(sleep=sleep))

    async def read(response: aiohttp.ClientResponse) -> tuple[int, list[bytes]]:
        return response.status, [chunk async for chunk in response.content.iter_chunked(5)]

    for _ in range(2):
        ((answered, chunks), _) = asyncio.run(fetch(f"{THINGS}?watch=true", "", read, status))
        assert answered == 200
        assert [json.loads(chunk)["object"]["code"] for chunk in chunks] == [410]
    assert waits == [1.0, 15.0]
    assert metrics.REFUSED_READS.labels("lost")._value.get() == 1
    assert asyncio.run(fetch(f"{THINGS}?watch=true", "", read))[0] == (200, [])
    assert metrics.REFUSED_READS.labels("lost")._value.get() == 0


def test_refused_list_of_crds_is_left_to_kopf() -> None:
    """kopf continues without, and a list of CRDs needs a right that not every installation has."""
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions?limit=5"

    async def status(response: aiohttp.ClientResponse) -> int:
        return response.status

    assert asyncio.run(fetch(path, "", status, 403))[0] == 403


def test_expired_page_of_a_list_raises_what_kopf_retries() -> None:
    with pytest.raises(aiohttp.ClientPayloadError):
        asyncio.run(fetch(f"{THINGS}?limit=5&continue=x", "", lambda response: response.json(), 410))
