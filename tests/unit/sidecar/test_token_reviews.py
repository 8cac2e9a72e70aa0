"""Reviews of tokens for a sidecar's pages, by an API server that works, refuses, stalls or sends garbage."""

from __future__ import annotations

import asyncio
import json
import re
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from lmcache_sidecar.token_reviews import AUDIENCE, Durations, TokenReviews

from testing.certificates import make_certificates

GOOD, BAD, POOR, FOREIGN = "good.token", "bad.token", "poor.token", "foreign.token"
SIDECAR_TOKEN = "the.sidecars.own.token"
USERS = {GOOD: "prometheus", POOR: "poor", FOREIGN: "prometheus"}
PATIENT = Durations(review=60)
Reply = Callable[["ApiServer", Any, str, dict[str, Any]], bytes]


def http_answer(content: bytes, code: int = 201) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (code, len(content), content)


def reviewed(server: ApiServer, connection: Any, path: str, review: dict[str, Any]) -> bytes:
    """The answer of a real API server, as far as the sidecar reads it."""
    spec = review["spec"]
    if path == "/apis/authentication.k8s.io/v1/tokenreviews":
        assert spec["audiences"] == [AUDIENCE]
        name = USERS.get(spec["token"])
        if name is None:
            return http_answer(json.dumps({"status": {"error": "invalid bearer token"}}).encode())
        audiences = [] if spec["token"] == FOREIGN else [AUDIENCE]
        user = {"username": name, "uid": "7", "groups": ["g"], "extra": {"k": ["v"]}}
        return http_answer(
            json.dumps({"status": {"authenticated": True, "user": user, "audiences": audiences}}).encode()
        )
    assert path == "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    assert (spec["uid"], spec["groups"], spec["extra"]) == ("7", ["g"], {"k": ["v"]})
    attributes = spec["nonResourceAttributes"]
    allowed = spec["user"] == "prometheus" and attributes == {"path": "/metrics", "verb": "get"}
    return http_answer(json.dumps({"status": {"allowed": allowed}}).encode())


class ApiServer(socketserver.ThreadingTCPServer):
    """An HTTPS server that records its requests. ``reply`` makes the answers."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, folder: Path) -> None:
        certificates = make_certificates(folder, "IP:127.0.0.1")
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(certificates.cert, certificates.key)
        (folder / "ca.crt").write_bytes(certificates.ca.read_bytes())
        (folder / "token").write_text(SIDECAR_TOKEN + "\n")
        self.folder = folder
        self.paths: list[str] = []
        self.bearers: list[str] = []
        self.reply: Reply = reviewed
        self.end = threading.Event()
        """Ends all answers that stall."""
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def environ(self) -> dict[str, str]:
        port = self.server_address[1]
        return {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": f"{port}"}

    @property
    def num_reviews(self) -> int:
        return sum(path.endswith("tokenreviews") for path in self.paths)

    def handle_error(self, *_: Any) -> None:
        """Clients that refuse the certificate, or give up, are part of the tests."""


class _Handler(socketserver.BaseRequestHandler):
    server: ApiServer

    def handle(self) -> None:
        with self.server.context.wrap_socket(self.request, server_side=True) as connection:
            head, _, body = self._receive(connection).partition(b"\r\n\r\n")
            lines = head.decode().split("\r\n")
            path = lines[0].split()[1]
            self.server.paths.append(path)
            self.server.bearers += [line.split()[-1] for line in lines if line.startswith("Authorization:")]
            connection.sendall(self.server.reply(self.server, connection, path, json.loads(body)))
            connection.unwrap()

    @staticmethod
    def _receive(connection: ssl.SSLSocket) -> bytes:
        received = b""
        while True:
            received += connection.recv(65536)
            head, end, body = received.partition(b"\r\n\r\n")
            lengths = [line.split()[1] for line in head.split(b"\r\n") if line.startswith(b"Content-Length:")]
            if end and len(body) >= int(lengths[0]):
                return received


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    with ApiServer(tmp_path) as running:
        yield running
        running.end.set()
        running.shutdown()


def statuses(
    server: ApiServer, *questions: tuple[str, str] | Callable[[], object], timing: Durations = PATIENT
) -> tuple[list[int], TokenReviews]:
    """Statuses of the answers to (path, token), one after another; 200: the page may be read."""

    async def run() -> tuple[list[int], TokenReviews]:
        reviews = TokenReviews(str(server.folder), server.environ, timing)
        codes = []
        try:
            for question in questions:
                if callable(question):
                    question()
                else:
                    page = await reviews.refusal(*question)
                    codes.append(page.status.value if page else 200)
        finally:
            reviews.close()
        return codes, reviews

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "token", "status"),
    [
        ("/metrics", GOOD, 200),
        ("/stats", GOOD, 403),
        ("/metrics", POOR, 403),
        ("/metrics", BAD, 401),
        ("/metrics", FOREIGN, 401),
    ],
)
def test_api_server_decides_who_reads_a_page(server: ApiServer, path: str, token: str, status: int) -> None:
    codes, reviews = statuses(server, (path, token))
    assert codes == [status]
    assert set(server.bearers) == {SIDECAR_TOKEN}
    assert reviews.problem == ""


@pytest.mark.parametrize("token", ["", "a b", "a\r\nX: y", "ä", "=", "x" * (16 << 10) + "x"])
def test_malformed_token_is_refused_without_a_review(server: ApiServer, token: str) -> None:
    assert statuses(server, ("/metrics", token))[0] == [401]
    assert server.paths == []


def test_results_are_cached_by_token_and_page(server: ApiServer) -> None:
    questions = [("/metrics", GOOD), ("/metrics", BAD), ("/stats", GOOD)]
    assert statuses(server, *questions * 3)[0] == [200, 401, 403] * 3
    assert server.num_reviews == 3


@pytest.mark.parametrize(
    ("timing", "num_reviews"), [(Durations(60, allowed=0), 3), (Durations(60, refused=0), 3)]
)
def test_expired_results_are_reviewed_again(server: ApiServer, timing: Durations, num_reviews: int) -> None:
    """A deleted ServiceAccount loses its access when the result expires."""
    codes, _ = statuses(server, ("/metrics", GOOD), ("/metrics", BAD), ("/metrics", GOOD), ("/metrics", BAD),
                        timing=timing)  # fmt: skip
    assert codes == [200, 401, 200, 401]
    assert server.num_reviews == num_reviews


def test_refused_tokens_take_bounded_memory_and_displace_no_allowed_one(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_sidecar.token_reviews._MAX_RESULTS", 3)
    flood = [("/metrics", f"token{number}") for number in range(5)]
    timing = Durations(60, 600, 600)
    codes, reviews = statuses(server, ("/metrics", GOOD), *flood, ("/metrics", GOOD), timing=timing)
    assert codes == [200, *[401] * 5, 200]
    assert server.num_reviews == 6
    assert len(reviews._refused) == 3
    assert not any(GOOD in repr(item) or "token4" in repr(item) for item in vars(reviews).values())


def stalled(server: ApiServer, connection: Any, path: str, review: dict[str, Any]) -> bytes:
    server.end.wait()
    return b""


def dripping(server: ApiServer, connection: Any, path: str, review: dict[str, Any]) -> bytes:
    """Each byte comes soon, and the answer never ends."""
    while not server.end.wait(0.01):
        connection.sendall(b"X")
    return b""


def constant(answer: bytes) -> Reply:
    return lambda *_: answer


FAULTS: list[tuple[Reply, str]] = [
    (stalled, "in time|within 0.3 s"),
    (dripping, "in time|within 0.3 s"),
    (constant(b""), "no answer of the API server"),
    (constant(b"\x00\xff" * 1000), "no answer of the API server"),
    (constant(http_answer(b"[" * 100_000)), "with no status"),
    (constant(http_answer(b'{"status": true}')), "with no status"),
    (constant(http_answer(b"x" * (300 << 10))), "more than 262144 bytes"),
    (constant(b'HTTP/1.1 201 X\r\nContent-Length: 99\r\n\r\n{"status": {}}'), "no answer of the API server"),
    (constant(http_answer(b"{}", 403)), "create tokenreviews: bind the ClusterRole system:auth-delegator"),
    (constant(http_answer(b"{}", 401)), "refuses the token in "),
    (constant(http_answer(b"{}", 500)), "answers tokenreviews with HTTP 500"),
]


@pytest.mark.parametrize(("reply", "problem"), FAULTS)
def test_page_is_not_shown_without_a_result(
    server: ApiServer, reply: Reply, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.reply = reply
    seconds = 0.3 if reply in (stalled, dripping) else 60
    codes, reviews = statuses(server, ("/metrics", GOOD), timing=Durations(review=seconds))
    assert codes == [503]
    assert re.search(problem, reviews.problem), reviews.problem
    assert reviews.problem in caplog.text
    assert GOOD not in caplog.text
    assert SIDECAR_TOKEN not in caplog.text


def test_second_review_that_fails_shows_no_page(server: ApiServer) -> None:
    def half(*arguments: Any) -> bytes:
        path = arguments[2]
        return reviewed(*arguments) if path.endswith("tokenreviews") else http_answer(b"{}", 403)

    server.reply = half
    codes, reviews = statuses(server, ("/metrics", GOOD))
    assert codes == [503]
    assert "subjectaccessreviews: bind" in reviews.problem


@pytest.mark.parametrize("audiences", [f"not-{AUDIENCE}", {AUDIENCE: True}, [f"not-{AUDIENCE}"], 7, True])
def test_audiences_other_than_a_list_with_this_one_show_no_page(server: ApiServer, audiences: object) -> None:
    status = {"authenticated": True, "user": {"username": "prometheus"}, "audiences": audiences}
    known, allowed = ({"status": status}, {"status": {"allowed": True}})

    def answer(*arguments: Any) -> bytes:
        return http_answer(json.dumps(known if arguments[2].endswith("tokenreviews") else allowed).encode())

    server.reply = answer
    assert statuses(server, ("/metrics", GOOD))[0] == [401]


@pytest.mark.parametrize("name", ["token", "ca.crt"])
def test_files_are_read_again_at_each_review(server: ApiServer, name: str) -> None:
    file = server.folder / name
    content = file.read_bytes()
    codes, reviews = statuses(
        server, file.unlink, ("/metrics", GOOD), lambda: file.write_bytes(content), ("/metrics", GOOD)
    )
    assert codes == [503, 200]
    assert reviews.problem == ""


def test_server_with_another_certificate_gets_no_token(server: ApiServer, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (server.folder / "ca.crt").write_bytes(make_certificates(other).ca.read_bytes())
    codes, reviews = statuses(server, ("/metrics", GOOD))
    assert codes == [503]
    assert "certificate verify failed" in reviews.problem
    assert server.bearers == []


def test_without_an_address_no_page_is_shown(server: ApiServer) -> None:
    async def run() -> HTTPStatus:
        reviews = TokenReviews(str(server.folder), {})
        page = await reviews.refusal("/metrics", GOOD)
        assert page is not None
        return page.status

    assert asyncio.run(run()) is HTTPStatus.SERVICE_UNAVAILABLE


def test_reviews_are_few_at_once_and_leave_the_loop_free(server: ApiServer) -> None:
    pending: set[object] = set()
    numbers: list[int] = []

    def slow(*arguments: Any) -> bytes:
        pending.add(arguments[1])
        numbers.append(len(pending))
        server.end.wait(0.05)
        pending.remove(arguments[1])
        return reviewed(*arguments)

    server.reply = slow

    async def run() -> list[int]:
        reviews = TokenReviews(str(server.folder), server.environ, Durations(review=60))
        tasks = [asyncio.create_task(reviews.refusal("/metrics", f"t{number}")) for number in range(32)]
        turns = 0
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            turns += 1
        reviews.close()
        assert turns > 100
        return [page.status.value for task in tasks if (page := task.result())]

    assert asyncio.run(run()) == [401] * 32
    assert max(numbers) == 4
