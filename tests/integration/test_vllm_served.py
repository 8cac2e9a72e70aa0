"""``vllm serve`` with two ranks and a real sidecar: hits, metrics, spans, tenants and shutdown.

All tests share the engine, which restarts if a test has ended it. Each request has the header of a tenant.
"""

import itertools
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmcache_client.vllm.router_discovery import RENDER_PATHS
from lmcache_client.vllm.tenant_header import PATHS
from lmcache_operator.api.parse import Platform, parse
from lmcache_operator.components.engine.engine import Engine
from lmcache_operator.contract.base import Context
from lmcache_operator.specs.names import STOCK_IMAGES
from lmcache_store import keys
from testing import workers
from testing.child_process import answers, free_port, wait_until
from testing.engine.environment import LOAD_GATE
from testing.engine.process import ServedEngine, patient_config
from testing.engine.tiny_adapter import save_adapter
from testing.otlp import OtlpReceiver, traceparent
from testing.processes import SidecarProcess
from tests.harness.client.real_engine import BLOCK, CHUNK, make_prompt, num_cached, wait_hit
from tests.harness.client.spans import ATTRIBUTES, PARENT_ID
from tests.harness.operator.model import cluster

pytestmark = pytest.mark.vllm

NUM_TOKENS = 100
HEADER = "X-LMCache-Tenant"
SALT, OTHER_SALT = "salt of search", "salt of batch"
MIDDLEWARE = "lmcache_client.vllm.tenant_header.RoutedTenantHeader"
DISCOVERY = "lmcache_client.vllm.router_discovery.RouterDiscovery"
SEEDS = map("served {}".format, itertools.count())


def rendered_options() -> list[str]:
    """The operator's options with which an engine finishes its answers before it ends, and serves IPv6."""
    dual_stack = replace(parse(cluster()), platform=Platform(host="::"))
    stateful_set = Engine().render(dual_stack, Context(STOCK_IMAGES))[-1]
    args = stateful_set["spec"]["template"]["spec"]["containers"][0]["args"]
    return [arg for arg in args if arg.startswith(("--host=", "--shutdown-timeout="))]


class World:
    """The engine, its sidecar, and a receiver of spans."""

    def __init__(self, sidecar: SidecarProcess, receiver: OtlpReceiver, folder: Path) -> None:
        self.sidecar, self.receiver, self._folder = sidecar, receiver, folder
        self._engine: ServedEngine | None = None

    @property
    def engine(self) -> ServedEngine:
        assert self._engine is not None
        return self._engine

    def start(self) -> None:
        """Start the engine unless it runs, and wait until it hits."""
        if self._engine is not None and self._engine.is_running:
            return
        self.close()
        self._engine = ServedEngine(
            self._folder / "log",
            free_port(),
            patient_config(self.sidecar.socket_path),
            "--tensor-parallel-size=2",
            f"--otlp-traces-endpoint={self.receiver.endpoint}",
            f"--middleware={MIDDLEWARE}",
            f"--middleware={DISCOVERY}",  # vLLM then answers at the paths of RENDER_PATHS
            *rendered_options(),
            environment={
                "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, workers.cores(2))),
                "OTEL_BSP_SCHEDULE_DELAY": "50",
            },
        )
        self._engine.wait_ready()
        prompt = make_prompt(CHUNK + BLOCK, next(SEEDS))
        wait_until(lambda: num_cached(self.complete(prompt)) == CHUNK, what="a hit")
        self.sidecar.wait_usable()

    def complete(self, prompt: list[int], salt: str = "tests", **headers: str) -> dict[str, Any]:
        return self.engine.complete(prompt, max_tokens=4, **{HEADER: salt}, **headers)

    def request(
        self,
        body: bytes,
        content_type: str = "application/json",
        path: str = "/v1/completions",
        method: str = "POST",
        salt: str | None = SALT,
    ) -> urllib.request.Request:
        """Return a request of a tenant, or without the header."""
        headers = {"Content-Type": content_type, **({HEADER: salt} if salt else {})}
        return urllib.request.Request(self.engine.url + path, body, headers, method=method)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("served")
    path = folder / "tenants"
    path.write_text(
        f"named: [{{name: search, saltHash: {keys.salt_hash(SALT).hex()}, minMemoryPercent: 20}}]"
    )
    with OtlpReceiver() as receiver, SidecarProcess(tenants_file=str(path)) as sidecar:
        world = World(sidecar, receiver, folder)
        yield world
        world.close()


@pytest.fixture
def world(shared: World) -> World:
    shared.start()
    return shared


def test_two_ranks_hit_and_count_their_loads(world: World) -> None:
    name = "vllm:lmcache_stored_rows_total"
    prompt = make_prompt(2000, next(SEEDS))
    num_rows = world.sidecar.stats()["memory"]["used_rows"] + 7
    before = world.engine.metrics("vllm:lmcache_")
    first = world.complete(prompt)
    # A worker counts a row when it has sent the commit. Lookups find the row after both ranks' commits.
    wait_until(lambda: world.engine.metrics(name)[name] >= before[name] + 2 * 7, what="stored rows")
    world.sidecar.wait_until(lambda stats: stats["memory"]["used_rows"] >= num_rows)
    second = world.complete(prompt)
    assert (num_cached(first), num_cached(second)) == (0, 1792)
    assert second["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    assert {client["column"] for client in world.sidecar.stats()["clients"]} == {0, 1}
    after = world.engine.metrics("vllm:lmcache_")
    figures = {each.removeprefix("vllm:lmcache_"): after[each] - before[each] for each in after}
    assert figures["loads_total"] == 2, "one load for each rank"
    assert figures["failed_loads_total"] == 0
    assert figures["loaded_blocks_total"] == 2 * 1792 // BLOCK
    assert figures["load_seconds_total"] > 0
    computed, loaded = times_of(world.sidecar, first), times_of(world.sidecar, second)
    assert computed["load_seconds"] == {}
    assert loaded["load_seconds"]["memory"] < loaded["first_token_seconds"]


def times_of(sidecar: SidecarProcess, answer: dict[str, Any]) -> dict[str, Any]:
    """The request on the sidecar's page, once its times are known. The engine reports it after its answer."""

    def ended(_: object) -> dict[str, Any] | None:
        requests = json.loads(sidecar.get(f"/requests?id={answer['id']}"))["requests"]
        return requests[0] if requests and requests[0]["first_token_seconds"] is not None else None

    request: dict[str, Any] = sidecar.wait_until(ended)
    return request


def test_engine_answers_on_ipv4_and_ipv6(world: World) -> None:
    urls = world.engine.url, world.engine.url.replace("127.0.0.1", "[::1]")
    assert [answers(f"{url}/health") for url in urls] == [True, True]


def test_spans_are_in_the_trace_of_the_http_request(world: World) -> None:
    prompt = make_prompt(1100, next(SEEDS))
    wait_until(lambda: num_cached(world.complete(prompt)) == 1024, what="a hit")
    trace_id = os.urandom(16).hex()
    world.complete(prompt, traceparent=traceparent(trace_id, PARENT_ID))
    spans = world.receiver.wait_for(trace_id, "llm_request", "lmcache.lookup", "lmcache.load")
    ours = {span.name: span for span in spans if span.name.startswith("lmcache.")}
    for span in ours.values():
        assert span.parent_id == PARENT_ID
        assert span.attributes.keys() <= ATTRIBUTES[span.name] | {"lmcache.request_id"}
        assert span.start_ns <= span.end_ns
        assert not span.is_error
    assert ours["lmcache.load"].attributes["lmcache.loaded_tokens"] == 1024
    (request,) = [span for span in spans if span.name == "llm_request"]
    assert request.parent_id == PARENT_ID, "vLLM's own span has the same parent"
    assert request.start_ns <= ours["lmcache.lookup"].start_ns
    assert ours["lmcache.load"].end_ns <= request.end_ns


def test_header_of_the_gateway_separates_tenants_and_counts_for_their_budgets(world: World) -> None:
    prompt = make_prompt(1000, next(SEEDS))
    wait_until(lambda: num_cached(world.complete(prompt, SALT)) == 768, what="a hit of the tenant")
    assert num_cached(world.complete(prompt, OTHER_SALT)) == 0
    world.sidecar.wait_until(lambda stats: stats["tenants"]["hit_tokens"]["search"] >= 768)  # a later report
    tenants = world.sidecar.stats()["tenants"]
    assert tenants["rows"]["search"] == 3
    assert tenants["hit_tokens"]["search"] < tenants["prompt_tokens"]["search"]
    # A client that knows the salt of another tenant does not get that tenant's KV.
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "cache_salt": SALT}
    request = world.request(json.dumps(body).encode(), salt="salt of a third tenant")
    with urllib.request.urlopen(request, timeout=300) as answer:
        assert num_cached(json.load(answer)) == 0
    assert SALT not in world.engine.log


def refusal_of(request: urllib.request.Request) -> tuple[int, str]:
    """Send a request. Returns the status, and the start of the message of an error."""
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"].split(":")[0]


def test_requests_whose_tenant_cannot_be_set_are_refused(world: World) -> None:
    refused = (400, HEADER)
    for body, content_type in (
        (b"prompt=a", "application/x-www-form-urlencoded"),
        (b"{", "application/json"),
        (b"--x--", "multipart/form-data; boundary=x"),
    ):
        assert refusal_of(world.request(body, content_type)) == refused
    for salt in ("a/b", "a@b", "a\\b", "a" * 129):
        status, reason = refusal_of(world.request(b'{"model": "tiny", "prompt": "a"}', salt=salt))
        assert (status, "at most 128 characters" in reason) == (400, True), "the guide says so"
    with urllib.request.urlopen(f"{world.engine.url}/openapi.json", timeout=300) as answer:
        paths = json.load(answer)["paths"]
    assert {"/v1/responses", "/v1/messages", "/v1/chat/completions/batch"} < paths.keys()
    operations = [(path, method) for path, methods in paths.items() for method in {*methods} - {"get"}]
    for path, method in operations:
        answered = refusal_of(world.request(b"{}", path=path, method=method.upper()))
        assert (answered == refused) is (path not in PATHS), f"{method} {path} may have no salt"
        # vLLM's router drops the header at most paths.
        if method == "post":
            assert refusal_of(world.request(b'{"input": "hi"}', path=path, salt=None)) == refused, path


def test_no_answer_shows_the_salt(world: World) -> None:
    """vLLM's answers at the paths that tokenize prompts contain the salt of the request."""
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    bodies = {
        path: chat if "chat" in path else {"prompt": "hi", "input": "hi"} for path in PATHS | RENDER_PATHS
    }
    shown = set()
    for path, body in bodies.items():
        for salt in (SALT, None):
            salted = {} if salt else {"cache_salt": SALT}
            data = json.dumps({"model": "tiny", "max_tokens": 1, **body, **salted}).encode()
            try:
                with urllib.request.urlopen(world.request(data, path=path, salt=salt), timeout=300) as answer:
                    text = answer.read().decode()
            except urllib.error.HTTPError as error:
                text = error.read().decode()
            if SALT in text:
                shown.add(path)
    assert shown == set()


def test_terminated_engine_finishes_its_streams(world: World) -> None:
    """The engine gets SIGTERM while it answers, and has the options that the operator renders."""
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": NUM_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    with urllib.request.urlopen(
        world.request(json.dumps(body).encode(), salt="tests"), timeout=300
    ) as answer:
        lines = (line for line in answer if line.startswith(b"data: "))
        assert b'"finish_reason":null' in next(lines)  # the answer has begun
        os.kill(world.engine.pid, signal.SIGTERM)
        *_, usage, end = lines
    assert end.strip() == b"data: [DONE]"
    assert json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"] == NUM_TOKENS
    assert world.engine.wait() == 0


def post(engine: ServedEngine, path: str, **body: Any) -> int:
    request = urllib.request.Request(
        engine.url + path, json.dumps(body).encode() if body else b"", {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return int(answer.status)


def tokens_of(answer: dict[str, Any]) -> list[int]:
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def is_paused(engine: ServedEngine) -> bool:
    with urllib.request.urlopen(engine.url + "/is_paused", timeout=300) as answer:
        return bool(json.load(answer)["is_paused"])


@pytest.fixture(scope="module")
def sidecar() -> Iterator[SidecarProcess]:
    with SidecarProcess() as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that stops all loads of ``engine`` while it exists."""
    return tmp_path_factory.mktemp("changing") / "gate"


@pytest.fixture(scope="module")
def engine(sidecar: SidecarProcess, gate: Path) -> Iterator[ServedEngine]:
    """An engine whose adapters and weights can be changed, with one rank."""
    log, config = gate.with_name("log"), patient_config(sidecar.socket_path)
    arguments = "--enable-lora", "--max-lora-rank=8"
    variables = {
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", LOAD_GATE: str(gate)
    }  # fmt: skip
    with ServedEngine(log, free_port(), config, *arguments, environment=variables) as engine:
        yield engine.wait_ready()


def test_pauses_during_loads_succeed(engine: ServedEngine, sidecar: SidecarProcess, gate: Path) -> None:
    """A weight update begins with a pause, at whose end vLLM resets all caches."""
    last, *prompts = [make_prompt(2 * CHUNK + BLOCK, next(SEEDS)) for _ in range(9)]
    with ThreadPoolExecutor(len(prompts) + 1) as pool:
        wait_hit(engine, sidecar)
        expected = [tokens_of(engine.complete(prompt)) for prompt in prompts]
        for mode in ("keep", "wait", "abort"):
            for prompt in (*prompts, last):
                wait_until(lambda prompt=prompt: num_cached(engine.complete(prompt)) > 0, what="a hit")
            gate.touch()
            answers = [pool.submit(engine.complete, prompt) for prompt in prompts]
            wait_until(lambda: gate.stat().st_size, what="a load")
            pause = pool.submit(post, engine, f"/pause?mode={mode}")
            wait_until(lambda: is_paused(engine), what="the pause")
            gate.unlink()
            assert (pause.result(), post(engine, "/resume")) == (200, 200), mode
            for answer, tokens in zip(answers, expected, strict=True):
                is_aborted = answer.result()["choices"][0]["finish_reason"] == "abort"
                assert tokens_of(answer.result()) == tokens or (is_aborted and mode == "abort"), mode
            assert num_cached(engine.complete(last)) > 0, "the weights are the same"
            assert [tokens_of(engine.complete(prompt)) for prompt in prompts] == expected, mode


def test_adapter_is_cached_unless_it_was_loaded_in_place(
    engine: ServedEngine, sidecar: SidecarProcess, tmp_path: Path
) -> None:
    prompt = make_prompt(CHUNK + BLOCK, next(SEEDS))
    first, second = (save_adapter(tmp_path / f"{seed}", seed) for seed in (1, 2))

    def load(path: Path, *, is_in_place: bool = True) -> None:
        body = {"lora_name": "legal", "lora_path": str(path), "load_inplace": is_in_place}
        assert post(engine, "/v1/load_lora_adapter", **body) == 200

    def complete(model: str = "legal") -> dict[str, Any]:
        return engine.complete(prompt, model=model)

    load(first, is_in_place=False)
    computed = complete()
    wait_until(lambda: num_cached(complete()) == CHUNK, what="a hit on KV of the adapter")
    assert complete()["choices"][0]["token_ids"] == computed["choices"][0]["token_ids"]
    assert num_cached(complete("tiny")) == 0
    load(second)
    replaced = [complete() for _ in range(2)]
    load(first)
    restored = complete()
    answers = [answer["choices"][0]["token_ids"] for answer in (computed, *replaced, restored)]
    assert answers[0] == answers[3] != answers[1] == answers[2]
    assert [num_cached(answer) for answer in (*replaced, restored)] == [0, 0, 0]
    sidecar.wait_until(
        lambda stats: stats["causes"]["uncached_reason"].startswith(
            "adapter legal can't be identified: it was loaded in place"
        )
    )


def test_reset_forgets_nothing_unless_the_weights_may_have_changed(
    engine: ServedEngine, sidecar: SidecarProcess
) -> None:
    # This test must stay the last one: it changes the weights of the module's engine for good.
    changed = "vLLM's weights may have changed (call of reload_weights) at "
    prompt = make_prompt(CHUNK + BLOCK, next(SEEDS))
    wait_until(lambda: num_cached(engine.complete(prompt)) == CHUNK, what="a hit")
    for path in ("/reset_prefix_cache?reset_external=true", "/pause", "/pause?mode=keep", "/resume"):
        assert post(engine, path) == 200
        assert path.startswith("/pause") or num_cached(engine.complete(prompt)) == CHUNK
    assert sidecar.stats()["private_reason"] == ""
    assert post(engine, "/collective_rpc", method="reload_weights") == 200
    for _ in range(2):
        assert num_cached(engine.complete(prompt)) == 0
        # The scheduler side reports it after the answer, on a thread of its own.
        sidecar.wait_until(lambda stats: stats["private_reason"].startswith(changed))
        wait_until(lambda: num_cached(engine.complete(prompt)) == CHUNK, what="a hit on new KV")
        assert post(engine, "/reset_prefix_cache?reset_external=true") == 200
