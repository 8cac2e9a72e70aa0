"""Tenants whose salt a gateway sets by a header, in ``vllm serve`` with a real sidecar."""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request

import pytest

from lmcache import keys
from lmcache.engines.vllm.tenant_header import PATHS
from testing.child_process import free_port, wait_until
from testing.engine.process import ServedEngine, connector_config
from testing.processes import SidecarProcess

pytestmark = pytest.mark.vllm

HEADER = "X-LMCache-Tenant"
SALT, OTHER_SALT = "salt of search", "salt of batch"
ANSWER_SECONDS = 30.0


def make_prompt(num_tokens: int, seed: int) -> list[int]:
    tokens = random.Random(f"{num_tokens} {seed}")
    return [tokens.randrange(4, 260) for _ in range(num_tokens)]


def num_cached(engine: ServedEngine, prompt: list[int], salt: str) -> int:
    usage = engine.complete(prompt, max_tokens=1, **{HEADER: salt})["usage"]
    return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def status_of(
    engine: ServedEngine,
    body: bytes,
    content_type: str = "application/json",
    path: str = "/v1/completions",
    method: str = "POST",
    salt: str | None = SALT,
) -> tuple[int, str]:
    """Send a body for a tenant, or without the header; returns the status and the message."""
    headers = {"Content-Type": content_type, **({HEADER: salt} if salt else {})}
    request = urllib.request.Request(engine.url + path, body, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]


def operations(engine: ServedEngine) -> list[tuple[str, str]]:
    """Path and method of each operation of the server that takes a body."""
    with urllib.request.urlopen(f"{engine.url}/openapi.json", timeout=300) as answer:
        paths = json.load(answer)["paths"]
    return [(path, method.upper()) for path, methods in paths.items() for method in {*methods} - {"get"}]


def test_header_of_the_gateway_separates_tenants_and_counts_for_their_budgets(tmp_path):
    path = tmp_path / "tenants"
    path.write_text(
        f"named: [{{name: search, saltHash: {keys.salt_hash(SALT).hex()}, minMemoryPercent: 20}}]"
    )
    with (
        SidecarProcess(memory_size="64Mi", tenants_file=str(path)) as sidecar,
        ServedEngine(
            tmp_path / "log",
            free_port(),
            connector_config(sidecar.socket_path, answer_seconds=ANSWER_SECONDS),
            "--middleware=lmcache.engines.vllm.tenant_header.RoutedTenantHeader",
        ) as engine,
    ):
        engine.wait_ready()
        sidecar.wait_attached(engine.run_short_request)
        prompt = make_prompt(1000, 1)
        wait_until(lambda: num_cached(engine, prompt, SALT) == 768, timeout=300)
        assert num_cached(engine, prompt, OTHER_SALT) == 0
        tenants = sidecar.stats()["tenants"]
        assert tenants["rows"]["search"] == 3
        assert 768 <= tenants["hit_tokens"]["search"] < tenants["prompt_tokens"]["search"]
        # A client that knows the salt of another tenant does not get that tenant's KV.
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "cache_salt": SALT}
        request = urllib.request.Request(
            f"{engine.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", HEADER: "salt of a third tenant"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            usage = json.load(answer)["usage"]
        assert not (usage["prompt_tokens_details"] or {}).get("cached_tokens")
        for body_bytes, content_type in (
            (b"prompt=a", "application/x-www-form-urlencoded"),
            (b"{", "application/json"),
            (b"--x--", "multipart/form-data; boundary=x"),
        ):
            status, message = status_of(engine, body_bytes, content_type)
            assert (status, message.split(":")[0]) == (400, HEADER)
        for path, method in (offered := operations(engine)):
            status, message = status_of(engine, b"{}", path=path, method=method)
            is_refused = (status, message.split(":")[0]) == (400, HEADER)
            assert is_refused is (path not in PATHS), f"{method} {path} may have no salt"
        assert {"/v1/responses", "/v1/messages", "/v1/chat/completions/batch"} < {path for path, _ in offered}
        for path, method in offered:  # vLLM's router drops the header at most paths
            if method == "POST" and not path.endswith("/completions/render"):
                status, message = status_of(engine, b'{"input": "hi"}', path=path, salt=None)
                assert (status, message.split(":")[0]) == (400, HEADER), path
        assert SALT not in engine.log
