"""SGLang servers share KV if their KV is the same, byte by byte, and only then."""

import contextlib
import json
import uuid

import pytest

from testing.engine.tiny_adapter import save_adapter
from testing.sglang.engine import patient_storage
from tests.harness.scope import third
from tests.harness.sglang.world import (
    full_pages,
    generate,
    load,
    new_prompt,
    other_weights,
    serving,
    serving_sidecar,
    store,
    wait_attached,
)

pytestmark = [pytest.mark.sglang, pytest.mark.redis]

NUM_TOKENS = 400
HIT = full_pages(NUM_TOKENS)  # in pages of 64 and of 128 tokens
DIFFERENCES = {
    "weights": lambda: {"model": other_weights(1)},
    "dtype": lambda: {"dtype": "bfloat16"},
    "dtype of KV": lambda: {"kv_cache_dtype": "fp8_e5m2"},
    "size of pages": lambda: {"page_size": 128},
    "layout of pages": lambda: {"hicache_mem_layout": "layer_first"},
    "configuration": lambda: {"json_model_override_args": json.dumps({"rope_theta": 20000.0})},
}


@pytest.fixture(scope="module")
def other_sidecar(sglang):
    """A sidecar of other engines. Pages of other sizes need another arena, but all sidecars share Redis."""
    with serving_sidecar(remote_url=sglang.redis.url) as process:
        yield process


@pytest.fixture
def serve(sglang, other_sidecar):
    """Returns a context manager: another engine with these arguments."""

    @contextlib.contextmanager
    def run(**arguments):
        with serving(sglang.logs, patient_storage(other_sidecar.socket_path), **arguments) as engine:
            wait_attached(engine, other_sidecar)
            yield engine

    return run


@pytest.fixture
def prompt(sglang_engine, sglang):
    """A prompt whose KV is in Redis."""
    prompt = new_prompt(NUM_TOKENS)
    store(sglang_engine, prompt)
    sglang.sidecar.settled()
    return prompt


@pytest.fixture
def namespace(sglang_engine, sglang):
    """The namespace of the engine that has stored the prompt."""
    return client_of(sglang_engine, sglang.sidecar)["namespace"]


@pytest.mark.parametrize("name", third(list(DIFFERENCES)))
def test_an_engine_shares_no_kv_with_an_engine_of_another(name, prompt, namespace, serve, other_sidecar):
    with serve(**DIFFERENCES[name]()) as other:
        (computed,) = store(other, prompt)
        assert computed.num_cached_tokens == 0
        loaded = load(other, prompt)
        assert loaded.cached["storage"] == HIT
        assert loaded.tokens == computed.tokens
        client = client_of(other, other_sidecar)
        assert client["namespace"] != namespace
        assert client["private_reason"] == "", "the engine shares its KV with equal engines"


def test_an_engine_of_another_node_loads_kv_from_redis(prompt, namespace, serve, other_sidecar, sglang):
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
    with serve(**different) as other:
        answer = generate(other, prompt)
        assert answer.cached["storage"] == HIT
        sglang.expected.check(prompt, answer)
        assert client_of(other, other_sidecar)["namespace"] == namespace
        other_sidecar.wait_until(lambda stats: stats["lookups"]["loaded_tokens"].get("remote", 0) >= HIT)


def test_engines_share_the_kv_of_adapters_with_the_same_files(prompt, serve, sglang):
    """SGLang names an adapter in its keys by name and path only."""
    path = save_adapter(sglang.logs / "adapter", 1)
    adapted = {"enable_lora": True, "lora_paths": f"adapter={path}", "lora_backend": "torch_native"}
    with serve(**adapted) as engine:
        (computed,) = store(engine, prompt, lora_path="adapter")
        assert computed.num_cached_tokens == 0
        assert computed.tokens != sglang.expected(prompt).tokens
    with serve(**adapted) as engine:
        answer = generate(engine, prompt, lora_path="adapter")
        assert answer.cached["storage"] == HIT
        assert answer.tokens == computed.tokens
        assert generate(engine, prompt).cached["storage"] == 0
    save_adapter(path, 2)
    with serve(**adapted) as engine:
        answer = generate(engine, prompt, lora_path="adapter")
        assert answer.num_cached_tokens == 0
        assert answer.tokens != computed.tokens


def test_extra_key_of_a_request_never_loads_pages_of_an_adapter_nor_the_other_way_round(serve, sglang):
    """SGLang appends the adapter's id to the extra key, and a client may know the adapter's name and path."""
    path = save_adapter(sglang.logs / "adapter", 3)
    adapter_id = uuid.uuid5(uuid.NAMESPACE_URL, f"adapter\0{path}").hex
    adapted = {"enable_lora": True, "lora_paths": f"adapter={path}", "lora_backend": "torch_native"}
    with serve(**adapted) as engine:
        for key in ({}, {"extra_key": "x"}):
            of_adapter = {"lora_path": "adapter", **key}
            of_base = {"extra_key": key.get("extra_key", "") + adapter_id}
            for first, second in ((of_adapter, of_base), (of_base, of_adapter)):
                prompt = new_prompt(NUM_TOKENS)
                expected = generate(engine, prompt, **second, cache_salt="alone")
                (stored,) = store(engine, prompt, **first)
                assert stored.tokens != expected.tokens
                answer = generate(engine, prompt, **second)
                assert (answer.num_cached_tokens, answer.tokens) == (0, expected.tokens)
                loaded = load(engine, prompt, **first)
                assert (loaded.cached["storage"], loaded.tokens) == (HIT, stored.tokens)


def test_engine_without_adapters_stores_nothing_under_the_id_of_an_adapter(sglang_engine):
    """A client of /generate can name any adapter, and another engine may have loaded it."""
    adapter_id = uuid.uuid4().hex
    for fields in ({"lora_id": adapter_id}, {"lora_id": "", "extra_key": adapter_id}):
        prompt = new_prompt(NUM_TOKENS)
        store(sglang_engine, prompt, **fields)
        assert load(sglang_engine, prompt, extra_key=adapter_id).cached["storage"] == HIT


def client_of(engine, sidecar):
    """Return what the sidecar knows of an engine's only rank."""
    processes = engine.processes()
    (client,) = (client for client in sidecar.stats()["clients"] if client["pid"] in processes)
    return client
