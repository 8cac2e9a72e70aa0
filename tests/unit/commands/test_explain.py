"""``kubectl lmcache explain`` with hostile, old and silent sidecars."""

import asyncio
import json
from typing import Any

import pytest

from lmcache_cli.__main__ import _parser
from lmcache_cli.commands import explain
from lmcache_cli.commands.connection import ApiConnection
from lmcache_cli.commands.explain import explanation
from lmcache_cli.commands.printing import document, print_problems
from lmcache_operator.errors import NotFoundError
from lmcache_operator.kube import pod_http
from lmcache_operator.kube.pod_http import PodAnswer
from tests.harness.commands.command_world import figures, gathered, pod, stats
from tests.harness.operator.model import cluster

ESCAPES = "\x1b]0;title\x07\x9b2J\ud800\u202e"


def request_of(answer: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run ``explain --request-id`` for a pod whose sidecar answers so to /requests."""

    class Api:
        async def get(self, *_: Any) -> Any:
            return cluster()

        async def find(self, *_: Any, **selectors: str) -> list[Any]:
            return [] if "inject" in selectors["labelSelector"] else [pod()]

    async def get(*_: Any) -> PodAnswer:
        return answer if isinstance(answer, PodAnswer) else PodAnswer(200, json.dumps(answer).encode())

    monkeypatch.setattr(pod_http.PodHttp, "get", get)
    argv = ["explain", "demo", "--request-id", "x", *words]
    arguments = _parser(argv).parse_args(argv)
    return asyncio.run(explain._explain_request(ApiConnection(Api(), "team"), arguments))


@pytest.mark.parametrize("words", [(), ("-o", "json"), ("-o", "yaml")])
@pytest.mark.parametrize(
    "request_",
    [
        {"request_id": "x", "tokens": 3, "common_tokens": "many", "time": "now", "load_seconds": [1]},
        {"request_id": ESCAPES, "tokens": {"new": 4, ESCAPES: 5}, "common_tokens": None, ESCAPES: ESCAPES},
    ],
)
def test_hostile_request_is_shown_without_escapes(request_, words, monkeypatch, capsys) -> None:
    assert request_of({"requests": [5, {"request_id": 5}, request_]}, monkeypatch, *words) == 0
    shown = capsys.readouterr().out
    assert "demo-engine-0" in shown
    assert all(character.isprintable() or character == "\n" for character in shown)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ([1, 2], "demo-engine-0: the answer of port 9464 is not of a sidecar: [1, 2]"),
        (PodAnswer(500, b"\x1b[31mbroken"), "demo-engine-0: HTTP 500: [31mbroken"),
        (PodAnswer(200, b"[" * 100_000), "demo-engine-0: the answer of port 9464 is not of a sidecar"),
    ],
)
def test_sidecar_that_does_not_answer_is_named(answer, problem, monkeypatch, capsys) -> None:
    with pytest.raises(NotFoundError, match="no pod knows a request"):
        request_of(answer, monkeypatch)
    assert problem in capsys.readouterr().err


def test_many_problems_take_few_lines(capsys) -> None:
    print_problems([f"pod {number}" for number in range(1000)])
    assert capsys.readouterr().err.splitlines()[9:] == ["pod 9", "and 990 more problems"]


TENANTS = {
    "bytes": {"default": 5, "search": 7},
    "prompt_tokens": {"search": 20},
    "causes": {"search": {"prompt_tokens": 20, "cause_tokens": {"new": 15, "memory": 5}}},
}


def print_tenant(name: str, output: str = "table") -> None:
    """Run ``explain --tenant`` for two pods, of which one has no prompts of tenants."""
    argv = ["explain", "demo", "--tenant", name, "-o", output]
    pods = gathered(figures(0, tenants=TENANTS), figures(1, tenants=TENANTS), figures(2))
    explain._print_tenant(pods, _parser(argv).parse_args(argv))


def test_causes_of_a_tenant_in_all_pods(capsys) -> None:
    print_tenant("search")
    assert capsys.readouterr().out.startswith("Tenant search.\n40 tokens of prompts: 25 % loaded, 75 % ")
    print_tenant("search", "json")
    content = json.loads(capsys.readouterr().out)
    assert (content["name"], content["bytes"]) == ("search", 14)
    assert content["causeTokens"] == {"new": 30, "memory": 10}
    assert {"guaranteedBytes", "diskBoundBytes", "findings"} < content.keys()


def test_explanation_lists_tenants_and_their_figures() -> None:
    search, default = explanation(gathered(figures(0, tenants=TENANTS)))["tenants"]
    assert (search["name"], search["promptTokens"], search["bytes"]) == ("search", 20, 7)
    assert (default["name"], default["promptTokens"], default["bytes"]) == ("default", 0, 5)


@pytest.mark.parametrize("output", ["json", "yaml"])
def test_texts_of_sidecars_are_printable_in_documents(output: str) -> None:
    branches = [{"prefix": ESCAPES, "num_tokens": 5}]
    causes = stats()["causes"] | {"cause_tokens": {ESCAPES: 5, "new": 5}, "branches": branches}
    shown = document(explanation(gathered(figures(causes=causes))), output)
    shown.encode()
    assert all(character.isprintable() or character == "\n" for character in shown)
