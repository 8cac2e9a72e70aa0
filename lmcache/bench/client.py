"""Sends requests to an engine, and reads the statistics of its sidecar."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from lmcache.bench.workloads import Request

REQUEST_ID = "lmcache-bench"
"""Begin of the ids of all requests of this program."""
_PAGE_SECONDS = 5.0
_MAX_BYTES = 16 << 20


class BenchError(Exception):
    """The benchmark cannot go on. The message says what to do."""


class Target(NamedTuple):
    """One engine, and the sidecar of its pod."""

    name: str
    engine_url: str
    sidecar_url: str = ""
    """Empty: the sidecar is not asked, and hits are not known."""


class Answer(NamedTuple):
    """Measurements of one request."""

    ttft_seconds: float
    """Time from the request to the first token."""
    seconds: float
    prompt_tokens: int
    output_tokens: int


def complete(url: str, model: str, request: Request, request_id: str, seconds: float) -> Answer:
    """Send one completion and read its stream. Raises BenchError; TimeoutError after ``seconds``."""
    body = {
        "model": model, "prompt": request.prompt, "max_tokens": request.output_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    connection = _connection(url, seconds)
    try:
        connection.connect()
        start = time.perf_counter()
        connection.request("POST", _path(url, "/v1/completions"), json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise _refusal(_error(response))
        first, usage = _read_stream(response, start + seconds)
        end = time.perf_counter()
    except (BenchError, TimeoutError):
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise BenchError(f"the engine at {url} ended a request early: {reason}") from error
    finally:
        connection.close()
    prompt_tokens = int(usage.get("prompt_tokens") or len(request.prompt))
    return Answer(first - start, end - start, prompt_tokens, int(usage.get("completion_tokens") or 0))


def _read_stream(response: http.client.HTTPResponse, deadline: float) -> tuple[float, Mapping[str, Any]]:
    """Return the time of the first token, and the engine's counts. Raises ValueError for a bad stream."""
    first = 0.0
    usage: Mapping[str, Any] = {}
    while line := response.readline(_MAX_BYTES):
        if time.perf_counter() > deadline:
            raise TimeoutError
        kind, _, data = line.partition(b":")
        if kind != b"data":
            continue
        if data.strip() == b"[DONE]":
            if not first:
                raise ValueError("the answer has no token")
            return first, usage
        event = json.loads(data)
        if "error" in event:
            raise _refusal(_message(event))
        if event.get("choices"):
            first = first or time.perf_counter()
        usage = event.get("usage") or usage
    raise ValueError("the stream broke off")


def model_of(url: str) -> tuple[str, int]:
    """Return the engine's first model, and its largest context; 0: not known. Raises BenchError."""
    answer = get_json(url, "/v1/models")
    try:
        model = answer["data"][0]
        return str(model["id"]), int(model.get("max_model_len") or 0)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise BenchError(f"{url}/v1/models names no model: is this the address of an engine?") from error


def get_json(url: str, path: str) -> Any:
    """Read a JSON page. Raises BenchError."""
    connection = _connection(url, _PAGE_SECONDS)
    try:
        connection.request("GET", _path(url, path))
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise BenchError(f"{url}{path}: {_error(response)}")
        return json.loads(response.read(_MAX_BYTES))
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise BenchError(f"{url}{path} cannot be read: {error or type(error).__name__}") from error
    finally:
        connection.close()


def _connection(url: str, seconds: float) -> http.client.HTTPConnection:
    """Return a connection that is not open yet. Raises BenchError for a bad address."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BenchError(f"{url} is not an address: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise BenchError(f"{url} is not an address: it must begin with http:// or https://, and a host")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(host, port, timeout=max(0.1, seconds))


def _path(url: str, path: str) -> str:
    return urlsplit(url).path.rstrip("/") + path


def _refusal(reason: str) -> BenchError:
    hint = ". Set --vocabulary to the size of the model's vocabulary" if "vocabulary" in reason else ""
    return BenchError(f"the engine refused a request: {reason}{hint}")


def _error(response: http.client.HTTPResponse) -> str:
    """Return status and reason of a failed request."""
    text = response.read(2000).decode(errors="replace")
    with contextlib.suppress(ValueError):
        text = _message(json.loads(text))
    return f"HTTP {response.status}: {_line(text)}"


def _message(answer: Any) -> str:
    """Return the message of an OpenAI error."""
    error = answer.get("error") if isinstance(answer, dict) else answer
    return _line(error.get("message") if isinstance(error, dict) else error)


def _line(text: Any) -> str:
    """Return the beginning of a text as one printable line."""
    return "".join(letter if letter.isprintable() else " " for letter in str(text)[:300]).strip()
