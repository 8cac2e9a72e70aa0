"""``kubectl lmcache hints`` and ``lmcache-sidecar hints``."""

import asyncio
import json
from typing import Any

import pytest

from lmcache_cli.__main__ import _parser
from lmcache_cli.commands import hints
from lmcache_cli.commands.connection import ApiConnection
from lmcache_operator.errors import NotFoundError
from lmcache_operator.kube import pod_http
from lmcache_operator.kube.pod_http import PodAnswer
from lmcache_sidecar.pages.hints import page_of
from lmcache_store.explain.retained import NOTHING
from tests.harness.commands.command_world import pod
from tests.harness.commands.json_server import JsonHandler, serving
from tests.harness.commands.sidecar_command import run_command
from tests.harness.operator.model import cluster
from tests.unit.sidecar.test_hint_pages import retained


def page(*listed: Any) -> bytes:
    return page_of(listed, "")


def shown(monkeypatch: pytest.MonkeyPatch, *answers: PodAnswer, words: tuple[str, ...] = ()) -> int:
    """Run the command for pods whose sidecars answer so."""

    class Api:
        async def get(self, *_: Any) -> Any:
            return cluster()

        async def find(self, *_: Any, **selectors: str) -> list[Any]:
            is_injected = "inject" in selectors["labelSelector"]
            return [] if is_injected else [pod(number) for number in range(len(answers))]

    async def get(self: Any, namespace: str, name: str, port: int, path: str) -> PodAnswer:
        assert path == "/hints"
        return answers[int(name.rpartition("-")[2])]

    monkeypatch.setattr(pod_http.PodHttp, "get", get)
    argv = ["hints", "demo", *words]
    return asyncio.run(hints._show(ApiConnection(Api(), "team"), _parser(argv).parse_args(argv)))


def test_hints_of_all_pods_are_shown(monkeypatch, capsys) -> None:
    answers = PodAnswer(200, page(retained(2))), PodAnswer(200, page(retained(3, tenant="batch")))
    assert shown(monkeypatch, *answers) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert rows == [["POD", "TENANT"], ["demo-engine-0", "search"], ["demo-engine-1", "batch"]]
    assert shown(monkeypatch, *answers, words=("-o", "json")) == 0
    content = json.loads(capsys.readouterr().out)
    assert [(hint["pod"], hint["tokens"]) for hint in content["hints"]] == [
        ("demo-engine-0", 32), ("demo-engine-1", 48),
    ]  # fmt: skip
    assert content["problems"] == []


def test_pods_without_hints_are_no_error(monkeypatch, capsys) -> None:
    assert shown(monkeypatch, PodAnswer(200, page())) == 0
    assert capsys.readouterr().out == f"{NOTHING}\n"


def test_pod_with_an_earlier_sidecar_is_named(monkeypatch, capsys) -> None:
    answers = PodAnswer(404, b"404 Not Found\n"), PodAnswer(200, page(retained()))
    assert shown(monkeypatch, *answers) == 0
    output = capsys.readouterr()
    assert output.err.startswith("demo-engine-0: its sidecar knows no hints: set spec.images.policy to ")
    assert "demo-engine-1" in output.out


def test_silent_pods_are_an_error(monkeypatch, capsys) -> None:
    with pytest.raises(NotFoundError, match="no sidecar answered: check that the pods"):
        shown(monkeypatch, PodAnswer(500, b"broken"))
    assert "demo-engine-0: HTTP 500: broken" in capsys.readouterr().err


class _Pages(JsonHandler):
    """A sidecar with one page."""

    content: Any

    def do_GET(self) -> None:
        self.answer(self.content, 200 if self.path == "/hints" else 404)


@pytest.mark.parametrize(
    ("content", "status", "text"),
    [
        (json.loads(page(retained(2))), 0, "search  session 7/1      32  0.00M"),
        (json.loads(page()), 0, NOTHING),
        ([1], 1, "is no sidecar"),
        ({"retained": 5}, 1, "is no sidecar"),
    ],
)
def test_command_of_the_sidecar_reads_its_page(content: Any, status: int, text: str) -> None:
    with serving(_Pages, content=content) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        done = run_command("hints", "--url", url)
        assert done[0] == status
        assert text in done[1]
        if not status:
            assert json.loads(run_command("hints", "--url", url, "-o", "json")[1]) == content


def test_command_of_the_sidecar_names_the_address_without_an_answer() -> None:
    status, text = run_command("hints", "--url", "http://127.0.0.1:1")
    assert status == 1
    assert "no sidecar answers at http://127.0.0.1:1" in text
