"""The API client of tests keeps connections open, and survives a server that closes them."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from testing.kube import pki
from testing.kube.api import Api, ApiError, close_idle_connections, wait_for


class Server(ThreadingHTTPServer):
    """Answers each request with the number of connections so far. Path /gone: 404."""

    num_connections = 0
    closes_after_answers = False

    def process_request(self, request, address):
        self.num_connections += 1
        super().process_request(request, address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        text = '{"message": "none"}' if self.path == "/gone" else f'{{"n": {self.server.num_connections}}}'
        self.send_response(404 if self.path == "/gone" else 200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
        self.close_connection = self.server.closes_after_answers

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def served(server: Server) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield
    finally:
        close_idle_connections()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def server(tmp_path) -> Iterator[Server]:
    keys = tmp_path / "pki"
    pki.make(keys)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / "api.crt", keys / "api.key")
    server = Server(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with served(server):
        yield server


@pytest.fixture
def api(server: Server, tmp_path: Path) -> Api:
    return Api(f"https://127.0.0.1:{server.server_port}", tmp_path / "pki" / "ca.crt", "token")


def test_requests_share_a_connection(api):
    assert [api.request("GET", "/")["n"] for _ in range(3)] == [1, 1, 1]
    with pytest.raises(ApiError, match="404: none"):
        api.request("GET", "/gone")
    assert api.request("GET", "/")["n"] == 1
    close_idle_connections()
    assert api.request("GET", "/")["n"] == 2


def test_request_on_a_connection_that_the_server_has_closed_is_sent_again(api, server):
    server.closes_after_answers = True
    assert [api.request("GET", "/")["n"] for _ in range(3)] == [1, 2, 3]


def test_wait_repeats_what_is_missing_and_raises_what_is_refused():
    answers = iter([ApiError(404, "none"), ApiError(503, "busy"), ConnectionRefusedError(), "", "ready"])

    def condition() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert wait_for(condition) == "ready"
    answers = iter([ApiError(403, "forbidden")])
    with pytest.raises(ApiError, match="forbidden"):
        wait_for(condition)
    answers = iter(["", "", ""])
    with pytest.raises(TimeoutError, match="last: ''"):
        wait_for(condition, 0)
