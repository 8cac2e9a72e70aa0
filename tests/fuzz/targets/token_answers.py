"""Answers of an API server about a token never open a page unless they say that the token may read it.

Input: the lengths of the two answers' bytes, and the bytes. The answers are those to a TokenReview and to a
SubjectAccessReview.
"""

import contextlib
import http.client
import io
import json
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any
from unittest import mock

from lmcache_sidecar.token_reviews import AUDIENCE, ReviewError, TokenReviews

from tests.fuzz.bytes_input import BytesInput
from tests.fuzz.target import Target

TOKEN, PATH = "fuzzed.token", "/metrics"
_opened: list[TokenReviews] = []


@contextlib.contextmanager
def opened() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="lmc-fuzz-") as folder:
        (Path(folder) / "token").write_text("sidecars.token")
        address = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"}
        _opened.append(TokenReviews(folder, address))
        yield
        _opened.pop().close()


@contextlib.contextmanager
def answering(answers: list[bytes]) -> Iterator[None]:
    """Let connections to the API server get these answers, one each, without TLS."""
    with contextlib.ExitStack() as stack:

        def connect(*_: Any, **__: Any) -> socket.socket:
            near, far = map(stack.enter_context, socket.socketpair())
            far.sendall(answers.pop(0) if answers else b"")
            far.shutdown(socket.SHUT_WR)
            return near

        context = mock.Mock(wrap_socket=lambda connection, server_hostname: connection)
        stack.enter_context(mock.patch.object(socket, "create_connection", connect))
        stack.enter_context(mock.patch.object(ssl, "create_default_context", return_value=context))
        yield


def status_of(answer: bytes) -> dict[str, Any]:
    """Return the status in an answer that the sidecar could read."""
    received = mock.Mock(makefile=lambda _: io.BytesIO(answer))
    response = http.client.HTTPResponse(received, method="POST")
    response.begin()
    status: dict[str, Any] = json.loads(response.read())["status"]
    return status


def run(data: bytes) -> None:
    source = BytesInput(data)
    answers = [source.sized(), source.sized()]
    with answering(list(answers)):
        status = _opened[-1]._ask(PATH, TOKEN, time.monotonic() + 60)
    assert status in (HTTPStatus.OK, HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
    if status is HTTPStatus.OK:
        known, allowed = map(status_of, answers)
        assert known["authenticated"] is True
        assert isinstance(known["audiences"], list)
        assert AUDIENCE in known["audiences"]
        assert allowed["allowed"] is True


TARGET = Target(run, (ReviewError,), opened=opened)
