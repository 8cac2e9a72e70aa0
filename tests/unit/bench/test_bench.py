"""The load generator: prompts, results, and engines that fail."""

import argparse
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from lmcache.bench import command, results
from lmcache.bench.client import Answer, BenchError, Target, complete, get_json, model_of
from lmcache.bench.runner import Phase, Run, Runner, Settings, busy_targets
from lmcache.bench.workloads import WORKLOADS, Request, Shape, sessions

SHAPE = Shape(num_requests=20, prompt_tokens=2048, output_tokens=4, vocabulary=256, seed="s")


def prompts(name: str, **changes: Any) -> list[Request]:
    return [request for session in sessions(name, SHAPE._replace(**changes)) for request in session]


def num_common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((number for number, (first, second) in pairs if first != second), min(len(left), len(right)))


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("num_requests", [1, 7, 500])
def test_workload_keeps_its_limits(name: str, num_requests: int) -> None:
    listed = prompts(name, num_requests=num_requests)
    assert len(listed) == num_requests
    assert max(len(request.prompt) for request in listed) <= SHAPE.prompt_tokens
    assert min(len(request.prompt) for request in listed) >= 16
    assert all(1 <= request.output_tokens <= SHAPE.output_tokens for request in listed)
    tokens = {token for request in listed for token in request.prompt}
    assert min(tokens) >= 32
    assert max(tokens) < SHAPE.vocabulary


@pytest.mark.parametrize("name", WORKLOADS)
def test_prompts_are_the_same_for_a_seed_and_new_for_another(name: str) -> None:
    assert prompts(name) == prompts(name)
    new_prompts = {request.prompt[:64] for request in prompts(name, seed="t")}
    assert not new_prompts & {request.prompt[:64] for request in prompts(name)}


@pytest.mark.parametrize("name", ["chat", "agents"])
def test_prompt_of_a_session_repeats_most_of_the_prompt_before(name: str) -> None:
    for session in sessions(name, SHAPE):
        for before, after in itertools.pairwise(session):
            assert num_common(before.prompt, after.prompt) >= len(before.prompt) // 2
            assert before.prompt != after.prompt or len(before.prompt) == SHAPE.prompt_tokens


def test_questions_share_a_document() -> None:
    first, second, *_, other = prompts("documents")
    assert num_common(first.prompt, second.prompt) >= SHAPE.prompt_tokens * 0.9
    assert num_common(first.prompt, other.prompt) < 10


def run_with(ttfts: list[float], causes: dict[str, int] | None = None, problem: str = "") -> dict[str, Any]:
    """A document with one phase."""
    answers = [Answer(ttft, ttft + 0.5, 1000, 10) for ttft in ttfts]
    phase = Phase("chat", "warm", 2.0, answers, causes)
    run = Run("model", 1, Settings(["chat"], SHAPE, 4, 60.0), 0.0, [phase], problem)
    return dict(json.loads(json.dumps(results.document(run))))


def test_document_has_percentiles_and_rates() -> None:
    (phase,) = run_with([number / 100 for number in range(1, 101)])["phases"]
    assert phase["ttftSeconds"] == {"p50": 0.5, "p95": 0.95}
    assert (phase["promptTokensPerSecond"], phase["outputTokensPerSecond"]) == (50_000, 500)
    assert (phase["requests"], phase["causeTokens"]) == (100, None)


def test_table_shows_times_hits_and_what_is_incomplete() -> None:
    text = "\n".join(results.table(run_with([0.1], {"memory": 60, "new": 40}, "the engine ended")))
    assert "model on 1 engine, started 1970-01-01T00:00:00+00:00" in text
    assert "100 ms" in text
    assert "memory 60 %, computed 40 %" in text
    assert "The results are not complete: the engine ended." in text


def test_results_without_answers_are_shown() -> None:
    empty = run_with([], problem="no engine")
    assert "no engine" in "\n".join(results.table(empty))


def test_comparison_shows_changes_and_other_settings() -> None:
    before, after = run_with([0.2], {"memory": 50, "new": 50}), run_with([0.1], {"memory": 75, "new": 25})
    after["settings"] = {**after["settings"], "requests": 9}
    text = "\n".join(results.compare(before, after))
    assert "Note: settings differs" in text
    assert "200 ms ->     100 ms  -50 %" in text
    assert "50 % ->       75 %  +25 points" in text


@pytest.mark.parametrize(
    "document", [[], {}, {"kind": "lmcache-bench", "version": 2}, {"phases": 1}, "x", None]
)
def test_other_files_are_no_results(document: Any, tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="results"):
        results.read(document)
    file = tmp_path / "a.json"
    file.write_text(json.dumps(document))
    with pytest.raises(BenchError, match=r"a\.json: .*results"):
        command.compare([file, file])


FIRST = b'data: {"choices": [{"text": "a"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 64, "completion_tokens": 4}}\n\n'
DONE = b"data: [DONE]\n\n"
Respond = Callable[[BaseHTTPRequestHandler], None]


def stream(*parts: bytes, status: int = 200) -> Respond:
    def respond(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.end_headers()
        handler.wfile.write(b"".join(parts))

    return respond


@contextmanager
def engine(respond: Respond, pages: dict[str, Any] | None = None) -> Iterator[str]:
    """A server that answers completions by ``respond``. Yields its URL."""
    answers = {"/v1/models": {"data": [{"id": "m", "max_model_len": 1024}]}, **(pages or {})}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            respond(self)

        def do_GET(self) -> None:
            self.send_response(200 if self.path in answers else 404)
            self.end_headers()
            self.wfile.write(json.dumps(answers.get(self.path)).encode())

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_answer_has_counts_of_the_engine() -> None:
    with engine(stream(b": comment\n\n", FIRST, FIRST, USAGE, DONE)) as url:
        answer = complete(url, "m", Request((1, 2), 4), "id", 10.0)
    assert (answer.prompt_tokens, answer.output_tokens) == (64, 4)
    assert 0 < answer.ttft_seconds <= answer.seconds


@pytest.mark.parametrize(
    ("respond", "message"),
    [
        (stream(FIRST), "the stream broke off"),
        (stream(DONE), "the answer has no token"),
        (stream(b"data: {\n\n"), "ended a request early"),
        (stream(b'data: {"error": {"message": "out of memory"}}\n\n'), "out of memory"),
        (stream(b'{"error": {"message": "Token id 999 is out of\\u001b vocabulary"}}', status=400),
         "HTTP 400: Token id 999 is out of  vocabulary"),
        (stream(b"<html>", status=502), "HTTP 502: <html>"),
        (lambda handler: handler.connection.close(), "ended a request early"),
    ],
)  # fmt: skip
def test_bad_answers_are_errors(respond: Respond, message: str) -> None:
    with engine(respond) as url, pytest.raises(BenchError, match=message):
        complete(url, "m", Request((1, 2), 4), "id", 10.0)


def test_address_of_something_else_is_an_error() -> None:
    with engine(stream(), {"/v1/models": {"data": []}}) as url:
        with pytest.raises(BenchError, match="names no model: is this the address of an engine"):
            model_of(url)
        with pytest.raises(BenchError, match="HTTP 404"):
            get_json(url, "/nothing")
    with pytest.raises(BenchError, match="cannot be read"):
        model_of("http://127.0.0.1:1")


def settings(seconds: float = 60.0) -> Settings:
    return Settings(["chat", "documents"], SHAPE, 2, seconds)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:abc", "http://h:99999", "http://[::1", "h:8000", "http://"]
)
def test_text_that_is_no_address_is_an_error(url: str) -> None:
    with pytest.raises(BenchError, match="is not an address"):
        model_of(url)


def test_engine_that_ends_leaves_the_results_so_far() -> None:
    numbers = iter(range(1000))

    def respond(handler: BaseHTTPRequestHandler) -> None:
        (stream(FIRST, USAGE, DONE) if next(numbers) < 5 else stream(FIRST))(handler)

    with engine(respond) as url:
        run = Runner([Target("pod", url)], settings(), lambda *_: None).measure()
    assert run.problem == f"pod: the engine at {url} ended a request early: the stream broke off"
    (phase,) = run.phases
    assert (phase.workload, phase.name, len(phase.answers)) == ("chat", "cold", 5)
    assert results.document(run)["phases"][0]["requests"] == 5


def test_slow_engine_ends_the_run_at_its_limit() -> None:
    def respond(handler: BaseHTTPRequestHandler) -> None:
        stream(FIRST)(handler)
        handler.connection.recv(1)  # until the client closes the connection

    with engine(respond) as url:
        run = Runner([Target("pod", url)], settings(seconds=1.0), lambda *_: None).measure()
    assert run.problem == "the limit of 1 s was reached"
    assert len(run.phases) == 1


def test_prompts_fit_the_model() -> None:
    with engine(stream(FIRST, USAGE, DONE)) as url:
        run = Runner([Target("pod", url)], settings(), lambda *_: None).run
    assert run.settings.shape.prompt_tokens == 1024 - SHAPE.output_tokens


def answered(number: int, age: float = 10.0, request_id: str = "cmpl-1") -> dict[str, Any]:
    return {"requests": [{"request_id": request_id, "time": time.time() - age}] * number}


@pytest.mark.parametrize(
    ("answer", "num_busy"),
    [
        (lambda: answered(3), 1),
        (lambda: answered(3, age=400.0), 0),
        (lambda: answered(3, request_id="cmpl-lmcache-bench-1-2-0"), 0),
        (lambda: {"requests": []}, 0),
        (lambda: {"requests": 3}, 0),
        (list, 0),
    ],
)
def test_requests_of_others_make_an_engine_busy(answer: Callable[[], Any], num_busy: int) -> None:
    """The answer has the time of the test, which may run minutes after its collection."""
    with engine(stream(), {"/requests": answer(), "/stats": {}}) as url:
        assert len(busy_targets([Target("pod", url, url), Target("no sidecar", url)])) == num_busy


@pytest.mark.parametrize(("age", "num_busy"), [(10.0, 1), (400.0, 0)])
def test_an_engine_is_busy_by_the_clock_of_its_sidecar(age: float, num_busy: int) -> None:
    for skew in (-3600.0, 3600.0):
        pages = {"/requests": answered(1, age - skew), "/stats": {"time": time.time() + skew}}
        with engine(stream(), pages) as url:
            assert len(busy_targets([Target("pod", url, url)])) == num_busy


@pytest.mark.parametrize(
    ("number", "message"),
    [(1, "served requests of others.*add --yes"), (0, r"Send 288 requests to pod\?.*--yes")],
)
def test_benchmark_needs_the_consent_of_the_user(number: int, message: str) -> None:
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    with engine(stream(), {"/requests": answered(number), "/stats": {}}) as url:
        targets = [Target("pod", url, url)]
        with pytest.raises(BenchError, match=message):
            command.runner_for(parser.parse_args([]), targets)
        assert command.runner_for(parser.parse_args(["--yes"]), targets).run.model == "m"
