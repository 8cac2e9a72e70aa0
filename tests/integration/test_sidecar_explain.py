"""``lmcache-sidecar explain`` and the page ``/requests``, with a real sidecar."""

import json
import os
import subprocess
import sys
import urllib.error

import pytest

from testing.child_process import free_port
from tests.harness.commands.json_server import JsonHandler, serving
from tests.harness.commands.sidecar_command import explain
from tests.harness.engine import report
from tests.harness.fences import difference, output

PAGE = "how-to/find-out-why-a-prompt-was-computed.md"


def explain_in_a_new_process(sidecar, *arguments: str | bytes, **variables: str) -> tuple[int, str]:
    """Run the command in a process of its own. Returns its exit status and what it printed."""
    command = [sys.executable, "-m", "lmcache_sidecar", "explain", "--url", sidecar.url, *arguments]
    environment = os.environ | variables
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    return ended.returncode, ended.stdout + ended.stderr


def test_explains_all_requests_and_one(sidecar, scheduler):
    assert explain(sidecar) == (0, "No prompt was counted yet: send a request to the engine.\n")
    report(scheduler, "cmpl-1", 1, 2, 3)
    report(scheduler, "cmpl-2", 1, 2, 4, num_hit_chunks=1, num_loaded_tokens=256)
    status, text = explain(sidecar)
    assert (status, difference(output(PAGE, "explain NAME\n"), text)) == (0, "")
    assert text.startswith("1,546 tokens of prompts: 17 % loaded, 83 % computed.")
    status, text = explain(sidecar, "--request-id", "pl-2")
    assert (status, difference(output(PAGE, "--request-id"), f"Pod NAME-engine-0.\n{text}")) == (0, "")
    assert text.startswith("Request cmpl-2: 773 tokens.\nAn earlier prompt began with the same 512 tokens.")
    status, text = explain(sidecar, "--output", "json")
    assert json.loads(text)["cause_tokens"] == {
        "new": 768, "tail": 10, "memory": 256, "being_stored": 256, "diverged": 256,
    }  # fmt: skip
    assert 'lmcache_cause_tokens_total{cause="diverged"} 256.0' in sidecar.get("/metrics")


def test_requests_are_remembered_newest_first_and_only_the_last_thousand(sidecar, scheduler):
    for number in range(1010):
        report(scheduler, f"r{number}", num_prompt_tokens=7)
    page = json.loads(sidecar.get("/requests"))
    assert [request["request_id"] for request in page["requests"]] == [f"r{n}" for n in range(1009, 909, -1)]
    assert page["requests"][0]["tokens"] == {"tail": 7}
    assert not json.loads(sidecar.get("/requests?id=r9-"))["requests"]
    status, text = explain(sidecar, "--request-id", "r9-")
    assert (status, "the sidecar remembers 1,000" in text) == (1, True)
    with pytest.raises(urllib.error.HTTPError) as refused:
        sidecar.get("/requests?limit=1")
    assert "unknown parameter 'limit': use id" in refused.value.read().decode()


class Answers(JsonHandler):
    content: bytes

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.content)


@pytest.mark.parametrize(
    ("body", "arguments", "sentence"),
    [
        (b"<html>", (), "no sidecar answers at"),
        (b'{"version": "0.0.9"}', (), "has no causes: it is not ready"),
        (b'{"not_ready_reason": "the disk hangs"}', (), "has no causes: the disk hangs"),
        *(
            (body, arguments, "")
            for body in (b"{}", b"[]", b'{"requests": 1}')
            for arguments in ((), ("--request-id", "r"))
        ),
    ],
)
def test_says_what_is_wrong_with_the_answer(body, arguments, sentence):
    with serving(Answers, content=body) as server:
        status, text = explain(f"http://127.0.0.1:{server.server_port}", *arguments)
    assert (status, len(text.splitlines())) == (1, 1)
    assert sentence in text


def test_says_where_no_sidecar_listens():
    url = f"http://127.0.0.1:{free_port()}"
    status, text = explain(url)
    assert status == 1
    assert text == (
        f"lmcache-sidecar: error: no sidecar answers at {url}: [Errno 111] Connection refused. "
        "Give the address of its HTTP server with --url\n"
    )


def test_proxy_is_not_asked_for_the_sidecar(sidecar):
    """A pod may have a proxy for the internet, which can't reach the pod's own sidecar."""
    variables = {"http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    status, text = explain_in_a_new_process(sidecar, **variables)
    assert (status, text) == (0, "No prompt was counted yet: send a request to the engine.\n")


def test_frozen_sidecar_is_given_up(sidecar):
    sidecar.freeze()
    status, text = explain(sidecar, answer_seconds=0.2)
    sidecar.thaw()
    assert status == 1
    assert "timed out" in text


def test_an_id_of_a_user_cannot_control_the_terminal(sidecar, scheduler):
    report(scheduler, "cmpl-\x1b[2J\r\nRequest x: 0 tokens.", 1)
    status, text = explain(sidecar, "--request-id", "cmpl-")
    assert status == 0
    assert text.startswith("Request cmpl-\\x1b[2J\\r\\nRequest x: 0 tokens.: 261 tokens.\n")


@pytest.mark.parametrize("name", [b"\xff", "é%&?=\x1b".encode()], ids=["not UTF-8", "special characters"])
def test_an_unknown_id_of_any_characters_is_not_found(sidecar, name):
    status, text = explain_in_a_new_process(sidecar, "--request-id", name)
    assert (status, len(text.splitlines())) == (1, 1)
    assert "none of the last requests has" in text
