"""Asks the API server who may read pages: a TokenReview, then a SubjectAccessReview for the page's path.

Reviews run in a few threads of their own and end in time, so calls of engines never wait for a review.
Without a result, no page is shown. Tokens are neither stored nor logged: results are cached by the tokens'
hashes.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import io
import json
import logging
import re
import socket
import ssl
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple, cast

from lmcache.common.recent import Recent
from lmcache_sidecar.http import Page

logger = logging.getLogger(__name__)

AUDIENCE = "lmcache.io"
"""Audience of accepted tokens. The API server itself refuses tokens of this audience."""
_MAX_TOKEN_CHARS = 16 << 10
_MAX_ANSWER_BYTES = 256 << 10
_MAX_REVIEWS = 4  # at once
_MAX_RESULTS = 256  # of each kind, so that refused tokens displace no allowed ones
_LOG_SECONDS = 60.0  # between two lines of the log
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_DELEGATOR = "bind the ClusterRole system:auth-delegator to the ServiceAccount of this pod"
_REASONS = {
    HTTPStatus.UNAUTHORIZED: f"this page needs a token of a ServiceAccount for the audience {AUDIENCE}",
    HTTPStatus.FORBIDDEN: "the token's ServiceAccount needs the right to get this nonResourceURL",
    HTTPStatus.SERVICE_UNAVAILABLE: "the sidecar cannot review tokens now: see its log",
}


class ReviewError(Exception):
    """The API server gave no result. The message says why, and what to do."""


class Durations(NamedTuple):
    """Durations in seconds."""

    review: float = 2.0
    """Limit of one review, with its two requests."""
    allowed: float = 60.0
    """Time for which an allowed token is not reviewed again."""
    refused: float = 10.0
    """Time for which a refused token is not reviewed again."""


DEFAULT = Durations()


class TokenReviews:
    """Decides who may read which page. For one event loop, until ``close``."""

    def __init__(self, directory: str, environ: Mapping[str, str], durations: Durations = DEFAULT) -> None:
        """``directory`` has the files ``token`` and ``ca.crt``, which are read at each review because the
        kubelet renews them. ``environ`` has the API server's address, as in each pod."""
        self.directory = directory
        self.problem = ""
        """Reason why the last review had no result; empty if it had one."""
        self._environ, self._durations = environ, durations
        self._threads = ThreadPoolExecutor(_MAX_REVIEWS, thread_name_prefix="token-review")
        self._allowed: Recent[tuple[bytes, str], tuple[HTTPStatus, float]] = Recent(_MAX_RESULTS)
        self._refused: Recent[tuple[bytes, str], tuple[HTTPStatus, float]] = Recent(_MAX_RESULTS)
        self._logged = float("-inf")

    def close(self) -> None:
        """Start no further reviews. Present ones end in time."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def refusal(self, path: str, token: str) -> Page | None:
        """Return the answer to a client that may not read the page; None if it may. Empty token: none."""
        if len(token) > _MAX_TOKEN_CHARS or not _TOKEN.fullmatch(token):
            return _page(HTTPStatus.UNAUTHORIZED)
        key, now = (hashlib.sha256(token.encode()).digest(), path), time.monotonic()
        for results in (self._allowed, self._refused):
            status, end = results.get(key, (HTTPStatus.OK, 0.0))
            if now < end:
                return None if status is HTTPStatus.OK else _page(status)
        try:
            status = await self._review(path, token)
        except ReviewError as error:
            self._report(str(error))
            return _page(HTTPStatus.SERVICE_UNAVAILABLE)
        self._report("")
        if status is HTTPStatus.OK:
            self._allowed[key] = status, now + self._durations.allowed
            return None
        self._refused[key] = status, now + self._durations.refused
        return _page(status)

    async def _review(self, path: str, token: str) -> HTTPStatus:
        """Return the result of a review. Raises ReviewError."""
        deadline = time.monotonic() + self._durations.review
        loop = asyncio.get_running_loop()
        review = loop.run_in_executor(self._threads, self._ask, path, token, deadline)
        try:
            return await asyncio.wait_for(review, self._durations.review)
        except asyncio.TimeoutError:
            raise ReviewError(f"no answer of the API server within {self._durations.review:g} s") from None

    def _report(self, problem: str) -> None:
        is_new, self.problem = problem not in ("", self.problem), problem
        if is_new and time.monotonic() - self._logged > _LOG_SECONDS:
            self._logged = time.monotonic()
            logger.error(
                "The sidecar can't review tokens, so it shows its pages to this pod only: %s", problem
            )

    # ---- in a thread ----

    def _ask(self, path: str, token: str, deadline: float) -> HTTPStatus:
        """Return OK, UNAUTHORIZED or FORBIDDEN. Raises ReviewError."""
        spec: dict[str, Any] = {"token": token, "audiences": [AUDIENCE]}
        status = self._post("authentication.k8s.io/v1/tokenreviews", "TokenReview", spec, deadline)
        user = status.get("user")
        # An API server that knows no audiences would leave them out, and accept tokens for other services.
        audiences = status.get("audiences")
        is_for_pages = isinstance(audiences, list) and AUDIENCE in audiences
        if status.get("authenticated") is not True or not is_for_pages or not isinstance(user, dict):
            return HTTPStatus.UNAUTHORIZED
        spec = {"user" if name == "username" else name: value for name, value in user.items()}
        spec["nonResourceAttributes"] = {"path": path, "verb": "get"}
        resource = "authorization.k8s.io/v1/subjectaccessreviews"
        status = self._post(resource, "SubjectAccessReview", spec, deadline)
        return HTTPStatus.OK if status.get("allowed") is True else HTTPStatus.FORBIDDEN

    def _post(self, resource: str, kind: str, spec: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        """Create a review, and return its status. Raises ReviewError."""
        group_version, _, plural = resource.rpartition("/")
        body = json.dumps({"apiVersion": group_version, "kind": kind, "spec": spec}).encode()
        try:
            code, answer = self._exchange(f"/apis/{resource}", body, deadline)
        except TimeoutError:
            raise ReviewError("the API server does not answer in time") from None
        except (OSError, http.client.HTTPException, OverflowError) as error:  # the last one: a huge length
            raise ReviewError(f"no answer of the API server: {str(error) or type(error).__name__}") from None
        if code == HTTPStatus.FORBIDDEN:
            raise ReviewError(f"the API server does not let it create {plural}: {_DELEGATOR}")
        if code == HTTPStatus.UNAUTHORIZED:
            raise ReviewError(f"the API server refuses the token in {self.directory}")
        if code not in (HTTPStatus.OK, HTTPStatus.CREATED):
            raise ReviewError(f"the API server answers {plural} with HTTP {code}")
        try:
            status = json.loads(answer)["status"]
        except (ValueError, KeyError, TypeError, RecursionError):
            status = None
        if not isinstance(status, dict):
            raise ReviewError(f"the API server answers {plural} with no status")
        return status

    def _exchange(self, path: str, body: bytes, deadline: float) -> tuple[int, bytes]:
        """Return status and body of the answer to a POST request. Raises OSError, HTTPException."""

        def seconds_left() -> float:
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                raise TimeoutError
            return seconds

        host, port = self._address()
        context = ssl.create_default_context(cafile=str(Path(self.directory) / "ca.crt"))
        client, headers = http.client.HTTPConnection(host, port), self._headers()
        with (
            socket.create_connection((host, port), timeout=seconds_left()) as plain,
            context.wrap_socket(plain, server_hostname=host) as client.sock,
        ):
            client.sock.settimeout(seconds_left())
            client.request("POST", path, body, headers)
            answer = bytearray()
            while piece := client.sock.recv(64 << 10):
                answer += piece
                if len(answer) > _MAX_ANSWER_BYTES:
                    raise http.client.HTTPException(f"it has more than {_MAX_ANSWER_BYTES} bytes")
                client.sock.settimeout(seconds_left())  # a limit of each step would let a slow server go on
        response = http.client.HTTPResponse(cast(socket.socket, _Received(bytes(answer))), method="POST")
        response.begin()
        return response.status, response.read()

    def _address(self) -> tuple[str, int]:
        host, port = (self._environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
        if not host or not port.isdecimal():
            raise OSError(
                "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT do not name it: run it in a pod"
            )
        return host, int(port)

    def _headers(self) -> dict[str, str]:
        file = Path(self.directory) / "token"
        token = file.read_text(encoding="ascii", errors="replace").strip()
        if not _TOKEN.fullmatch(token):
            raise OSError(f"{file} contains no token")
        json_type = "application/json"
        headers = {"Accept": json_type, "Content-Type": json_type, "User-Agent": "lmcache-sidecar"}
        return headers | {"Authorization": f"Bearer {token}", "Connection": "close"}


class _Received:
    """A complete answer in place of a socket."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def makefile(self, _: str) -> io.BytesIO:
        """Return the answer as a file."""
        return io.BytesIO(self._answer)


def _page(status: HTTPStatus) -> Page:
    return Page(status, f"{status.value} {status.phrase}: {_REASONS[status]}\n".encode())
