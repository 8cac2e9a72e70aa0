"""What kopf is shown of the API server: metadata, whatever the objects hold."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import kopf
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from lmcache_operator.kube.shallow import loads
from lmcache_operator.kube.watch import login
from lmcache_operator.specs.names import digest

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


def nested(levels: int, inner: str) -> str:
    return '{"a":' * levels + inner + "}" * levels


@given(values)
def test_what_is_not_deep_is_read_as_it_is(value: Any) -> None:
    assert loads(json.dumps(value).encode()) == value


@given(values)
def test_what_is_too_deep_is_cut_off_and_its_neighbours_are_kept(value: Any) -> None:
    text = json.dumps(value)
    found = loads(f'[{text},{nested(5000, text)},{{"x":{text}}},{nested(3000, text)}]'.encode())
    assert (found[0], found[2]) == (value, {"x": value})
    for deep in (found[1], found[3]):
        levels = 0
        while deep is not None:
            deep, levels = deep["a"], levels + 1
        assert 100 < levels < 500


METADATA = {"name": "n", "namespace": "s", "uid": "u", "resourceVersion": "7", "labels": {"a": "b"}}
DEEP = '{"kind":"PartialObjectMetadata","metadata":{"managedFields":' + nested(3000, "1") + ',"name":"deep"}}'
WHOLE = {"kind": "PartialObjectMetadata", "metadata": {**METADATA, "annotations": {"huge": "x" * 10}}}
SLIM = METADATA | {"annotations": {"digest": digest({"huge": "x" * 10})}}


def write_kubeconfig(url: str) -> None:
    config = {
        "current-context": "x",
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        "users": [{"name": "x", "user": {"token": "t"}}],
        "clusters": [{"name": "x", "cluster": {"server": url}}],
    }
    Path(os.environ["KUBECONFIG"]).write_text(json.dumps(config))


async def ask(
    path: str, body: str, use: Callable[[aiohttp.ClientResponse], Awaitable[Any]]
) -> tuple[Any, str]:
    """What `use` makes of an answer with this body, and the formats that were asked for."""
    accepted = []

    async def handle(request: web.Request) -> web.Response:
        accepted.append(request.headers["Accept"])
        return web.Response(text=body, content_type="application/json")

    application = web.Application()
    application.router.add_route("*", "/{tail:.*}", handle)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    write_kubeconfig(url)
    found = await login(settings=kopf.OperatorSettings())
    assert found is not None
    try:
        async with found.aiohttp_session as session, session.get(url + path) as response:
            return await use(response), accepted[0]
    finally:
        await runner.cleanup()


@pytest.fixture(autouse=True)
def _kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))


def test_a_list_is_of_metadata_and_one_deep_item_does_not_break_it() -> None:
    body = f'{{"kind":"PartialObjectMetadataList","items":[{DEEP},{json.dumps(WHOLE)}]}}'
    answer, accepted = asyncio.run(ask("/apis/a/v1/things?limit=5", body, lambda r: r.json()))
    assert accepted == "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
    assert [item["metadata"] for item in answer["items"]] == [{"name": "deep"}, SLIM]


def test_a_watch_is_of_metadata_and_one_deep_event_does_not_end_it() -> None:
    status = {"type": "ERROR", "object": {"kind": "Status", "code": 410}}
    lines = [f'{{"type":"ADDED","object":{DEEP}}}', json.dumps({"type": "MODIFIED", "object": WHOLE})]
    body = "\n".join([*lines, json.dumps(status)]) + "\n"

    async def read(response: aiohttp.ClientResponse) -> list[Any]:
        chunks = [chunk async for chunk in response.content.iter_chunked(5)]
        return [json.loads(line) for line in b"".join(chunks).splitlines()]

    (deep, whole, error), accepted = asyncio.run(ask("/apis/a/v1/things?watch=true", body, read))
    assert accepted == "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
    assert deep["object"]["metadata"] == {"name": "deep"}
    assert (whole["type"], whole["object"]["metadata"]) == ("MODIFIED", SLIM)
    assert error == status


@pytest.mark.parametrize("path", ["/apis", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions?limit=5"])
def test_what_kopf_reads_for_itself_comes_whole(path: str) -> None:
    body = {"kind": "CustomResourceDefinitionList", "items": [{"spec": {"group": "g"}}]}
    answer, accepted = asyncio.run(ask(path, json.dumps(body), lambda r: r.json()))
    assert (answer, accepted) == (body, "*/*")
