"""KV hints of requests to ``vllm serve``, and for prompts that it does not compute, with a real sidecar."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from lmcache_client.vllm.hints import FIELD
from lmcache_client.vllm.hints_route import PATH
from testing.child_process import free_port, wait_until
from testing.engine.process import ServedEngine, patient_config
from testing.processes import SidecarProcess
from tests.harness.client.real_engine import CHUNK, make_prompt, num_cached, wait_hit

pytestmark = pytest.mark.vllm

MIDDLEWARES = "lmcache_client.vllm.tenant_header.TenantHeader", "lmcache_client.vllm.hints_route.HintsRoute"
RETAIN = {"action_id": "keep", "action_type": "retain", "payload": {"ttlSeconds": 60}}
PREFETCH = {"action_id": "fetch", "action_type": "prefetch"}
UNKNOWN = {"action_id": "what", "action_type": "pin"}
RETAINED = {"action_id": "keep", "outcome": "accepted", "tokens": 2 * CHUNK, "ttlSeconds": 60.0}
FETCHED = {"action_id": "fetch", "outcome": "accepted", "tokens": 2 * CHUNK}


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    disk = tmp_path_factory.mktemp("disk")
    with SidecarProcess(disk_path=disk, disk_size="256Mi", drain_grace_seconds=5) as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def engine(sidecar: SidecarProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    log, config = tmp_path_factory.mktemp("hints") / "log", patient_config(sidecar.socket_path)
    middlewares = (f"--middleware={middleware}" for middleware in MIDDLEWARES)
    with ServedEngine(log, free_port(), config, *middlewares) as engine:
        wait_hit(engine.wait_ready(), sidecar)
        yield engine


def post(engine: ServedEngine, path: str, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
    """POST a body. Returns the status and the JSON of the answer."""
    headers |= {"Content-Type": "application/json"}
    request = urllib.request.Request(engine.url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def hint(engine: ServedEngine, *actions: dict[str, Any], **body: Any) -> list[dict[str, Any]]:
    """Send hints for a prompt that is not computed. Returns the decisions."""
    status, answer = post(engine, PATH, {"hints": actions, **body})
    assert (status, list(answer)) == (200, ["hints"])
    decisions: list[dict[str, Any]] = answer["hints"]
    return decisions


def compute(engine: ServedEngine, sidecar: SidecarProcess, path: str, **body: Any) -> None:
    """Compute a prompt until it hits, and store it on the disk."""

    def is_hit() -> bool:
        status, answer = post(engine, path, {"max_tokens": 1, **body})
        assert status == 200
        return num_cached(answer) == 2 * CHUNK

    wait_until(is_hit, what="a hit")
    sidecar.wait_until(lambda stats: not stats["num_unwritten_rows"])


def num_computed(engine: ServedEngine, sidecar: SidecarProcess) -> tuple[float, int]:
    """Prompt tokens that the engine and the sidecar have counted."""
    name = "vllm:prompt_tokens_total"
    return engine.metrics(name)[name], sidecar.settled()["causes"]["prompt_tokens"]


def test_response_has_a_decision_about_each_action(engine: ServedEngine, sidecar: SidecarProcess) -> None:
    body = {"prompt": make_prompt(600, "response"), "max_tokens": 16, "ignore_eos": True}

    def answer(**params: Any) -> Any:
        status, answer = post(engine, "/v1/completions", body | {"kv_transfer_params": params})
        assert status == 200
        return answer["kv_transfer_params"]

    def decisions() -> Any:
        """The answer, unless the request ends before the sidecar answers."""
        first, second = answer(**{FIELD: [RETAIN, UNKNOWN]})["lmcache"]["hints"]
        return (first, second) if first["outcome"] != "deferred" else None

    first, second = wait_until(decisions, what="an answer of the sidecar")
    assert first == RETAINED
    assert (second["action_id"], second["outcome"]) == ("what", "refused")
    assert "the types are retain, prefetch, release" in second["reason"]
    assert answer() is None
    handed_over = answer(do_remote_decode=True, **{FIELD: "retain"})["lmcache"]
    assert (handed_over["num_tokens"], handed_over["hints"][0]["outcome"]) == (2 * CHUNK, "refused")


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": make_prompt(600, "tokens")},
        {"prompt": "a" * 600},
        {"messages": [{"role": "user", "content": "b" * 600}]},
    ],
    ids=["tokens", "text", "messages"],
)
def test_prompt_is_prefetched_and_not_computed(
    engine: ServedEngine, sidecar: SidecarProcess, prompt: dict[str, Any]
) -> None:
    path = "/v1/chat/completions" if "messages" in prompt else "/v1/completions"
    compute(engine, sidecar, path, **prompt)
    before = num_computed(engine, sidecar)
    retained, refused = hint(engine, RETAIN, UNKNOWN, **prompt)
    assert (retained, refused["outcome"]) == (RETAINED, "refused")
    assert num_computed(engine, sidecar) == before
    sidecar.terminate()
    sidecar.arena_path.unlink()
    sidecar.start()
    wait_hit(engine, sidecar)
    before, num_rows = num_computed(engine, sidecar), sidecar.stats()["memory"]["used_rows"]
    assert hint(engine, PREFETCH, **prompt) == [FETCHED]
    sidecar.wait_until(lambda stats: stats["memory"]["used_rows"] == num_rows + 2)
    assert num_computed(engine, sidecar) == before
    status, answer = post(engine, path, {"max_tokens": 1, **prompt})
    assert (status, num_cached(answer)) == (200, 2 * CHUNK)


def test_errors_of_the_engine_are_passed_on(engine: ServedEngine, sidecar: SidecarProcess) -> None:
    before = num_computed(engine, sidecar)
    for status, body in (
        (400, {"prompt": "a"}),
        (400, {"hints": [RETAIN]}),
        (400, {"prompt": "a" * 10_000, "hints": [RETAIN]}),
        (404, {"prompt": "a", "model": "other", "hints": [RETAIN]}),
    ):
        answered, content = post(engine, PATH, body)
        assert (answered, list(content)) == (status, ["error"]), body
    assert num_computed(engine, sidecar) == before


def test_tenant_of_the_header_has_its_own_rows(engine: ServedEngine, sidecar: SidecarProcess) -> None:
    prompt = make_prompt(600, "tenant")
    header = {"X-LMCache-Tenant": "search"}
    _, answer = post(engine, PATH, {"prompt": prompt, "hints": [RETAIN]}, **header)
    assert answer["hints"] == [RETAINED]
    status, answer = post(engine, PATH, {"prompt": prompt, "model": "search", "hints": [RETAIN]}, **header)
    assert (status, "search" in answer["error"]["message"]) == (404, False), "errors do not show the salt"


def test_hints_are_deferred_without_a_sidecar(engine: ServedEngine, sidecar: SidecarProcess) -> None:
    # This test must stay the last one: it ends the sidecar for some time.
    sidecar.terminate()
    first, second = hint(engine, RETAIN, UNKNOWN, prompt=make_prompt(600, "absent"))
    assert (first["outcome"], second["outcome"]) == ("deferred", "refused")
    assert "the sidecar does not answer" in first["reason"]
    sidecar.start()
    wait_hit(engine, sidecar)
    assert hint(engine, RETAIN, prompt=make_prompt(600, "back")) == [RETAINED]
