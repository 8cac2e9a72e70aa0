"""SGLang servers share KV if their KV is the same, byte by byte, and only then."""

from __future__ import annotations

import contextlib
import json

import pytest

from testing.processes import RedisProcess
from testing.sglang.engine import lmcache_storage, make_prompt
from tests.harness.sglang_world import (
    full_pages,
    generate,
    other_weights,
    reference,
    save_adapter,
    serving,
    serving_sidecar,
    store,
    wait_attached,
)

pytestmark = [pytest.mark.sglang, pytest.mark.redis]

NUM_TOKENS = 1030
HIT = full_pages(NUM_TOKENS)  # in pages of 64 and of 128 tokens
PROMPT = make_prompt(NUM_TOKENS, "test_sglang_sharing")
DIFFERENCES = {
    "weights": lambda: {"model": other_weights(1)},
    "dtype": lambda: {"dtype": "bfloat16"},
    "dtype of KV": lambda: {"kv_cache_dtype": "fp8_e5m2"},
    "size of pages": lambda: {"page_size": 128},
    "layout of pages": lambda: {"hicache_mem_layout": "layer_first"},
    "configuration": lambda: {"json_model_override_args": json.dumps({"rope_theta": 20000.0})},
}


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def redis():
    with RedisProcess() as server:
        yield server


@pytest.fixture(scope="module")
def other_sidecar(redis):
    """A sidecar of other engines. Pages of other sizes need another arena, but all sidecars share Redis."""
    with serving_sidecar(remote_url=redis.url) as process:
        yield process


@pytest.fixture(scope="module")
def expected(logs):
    with reference(logs) as engine:
        yield engine


@pytest.fixture(scope="module")
def namespace(redis, logs):
    """The namespace of an engine that has stored the prompt in Redis."""
    with (
        serving_sidecar(remote_url=redis.url) as sidecar,
        serving(logs, lmcache_storage(sidecar.socket_path)) as engine,
    ):
        wait_attached(engine, sidecar)
        store(engine, PROMPT)
        sidecar.wait_until(lambda stats: stats["num_unwritten_rows"] == 0)
        return client_of(engine, sidecar)["namespace"]


@pytest.mark.parametrize("name", DIFFERENCES)
def test_an_engine_shares_no_kv_with_an_engine_of_another(name, namespace, other_sidecar, logs):
    with serving(logs, lmcache_storage(other_sidecar.socket_path), **DIFFERENCES[name]()) as other:
        wait_attached(other, other_sidecar)
        (computed,) = store(other, PROMPT)
        assert computed.num_cached_tokens == 0
        other.flush_cache()
        loaded = generate(other, PROMPT)
        assert loaded.cached["storage"] == HIT
        assert loaded.tokens == computed.tokens
        client = client_of(other, other_sidecar)
        assert client["namespace"] != namespace
        assert client["private_reason"] == "", "the engine shares its KV with equal engines"


def test_engines_with_other_differences_share_kv(namespace, other_sidecar, expected, logs):
    """Sizes of pools, policies and names do not change KV."""
    different = {
        "max_total_tokens": 8192,
        "max_running_requests": 3,
        "hicache_ratio": 3.0,
        "hicache_write_policy": "write_through_selective",
        "served_model_name": "another",
        "random_seed": 1,
        "chunked_prefill_size": 512,
    }
    with serving(logs, lmcache_storage(other_sidecar.socket_path), **different) as other:
        wait_attached(other, other_sidecar)
        answer = generate(other, PROMPT)
        assert answer.cached["storage"] == HIT
        expected.check(PROMPT, answer)
        assert client_of(other, other_sidecar)["namespace"] == namespace


def test_engines_share_the_kv_of_adapters_with_the_same_files(other_sidecar, logs):
    """SGLang names an adapter in its keys by name and path only."""
    with reference(logs, **with_adapter(save_adapter(logs / "adapter", 1))) as expected:
        first, second = (expected(PROMPT, lora_path=name) for name in (None, "adapter"))
        assert first.tokens != second.tokens
    with adapted(other_sidecar, logs) as engine:
        store(engine, PROMPT, lora_path="adapter")
    with adapted(other_sidecar, logs) as engine:
        answer = generate(engine, PROMPT, lora_path="adapter")
        assert answer.cached["storage"] == HIT
        assert answer.tokens == second.tokens
        assert generate(engine, PROMPT).cached["storage"] == 0
    save_adapter(logs / "adapter", 2)
    with adapted(other_sidecar, logs) as engine:
        answer = generate(engine, PROMPT, lora_path="adapter")
        assert answer.num_cached_tokens == 0
        assert answer.tokens != second.tokens


@contextlib.contextmanager
def adapted(sidecar, logs):
    storage = lmcache_storage(sidecar.socket_path)
    with serving(logs, storage, **with_adapter(logs / "adapter")) as engine:
        wait_attached(engine, sidecar)
        yield engine


def with_adapter(path):
    return {"enable_lora": True, "lora_paths": f"adapter={path}", "lora_backend": "torch_native"}


def client_of(engine, sidecar):
    """Return what the sidecar knows of an engine's only rank."""
    processes = engine.processes()
    (client,) = (client for client in sidecar.stats()["clients"] if client["pid"] in processes)
    return client
