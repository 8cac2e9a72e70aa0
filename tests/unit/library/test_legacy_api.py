"""Names of the LMCache 0.1-0.3 API, exactly, and calls of its users."""

import importlib
import inspect
from typing import Any

import pytest
import torch

from lmcache.cache_engine import LMCacheEngine, LMCacheEngineBuilder
from lmcache.config import LMCacheEngineConfig, LMCacheEngineMetadata
from tests.harness.library.kv_cache import (
    CHUNK,
    cut,
    is_same,
    make_config,
    make_kv,
    make_metadata,
    make_tokens,
)

BACKEND = "config metadata dst_device='cuda'"
QUEUED = {
    "__init__": BACKEND,
    "put": "key kv_chunk blocking=True",
    "put_blocking": "key kv_chunk",
    "put_worker": "",
    "contains": "key",
    "get": "key",
    "batched_put": "keys_and_chunks blocking=True",
    "batched_get": "keys",
    "close": "",
}
LOCAL = {**QUEUED, "put_nonblocking": "key kv_chunk", "remove": "key"}
EVICTOR = {"update_on_get": "key cache_dict", "update_on_put": "cache_dict cache_size", "get_size": "kv_obj"}
POOL = {"__init__": "metadata", "allocate": "kv_chunk", "free": "kv_obj"}
CONNECTOR = {"exists": "key", "get": "key", "set": "key obj", "list": "", "close": ""}
CHUNKS = "tokens kv_tensors fmt num_skip_prefix_chunk=0"

# class -> method -> parameters without self, in order, with their defaults
CLASSES: dict[str, dict[str, str]] = {
    "storage_backend.abstract_backend.LMCBackendInterface": {
        "__init__": "dst_device='cuda'",
        **{name: QUEUED[name] for name in ("put", "contains", "get", "batched_put", "batched_get", "close")},
    },
    "storage_backend.local_backend.LMCLocalBackend": LOCAL,
    "storage_backend.local_backend.LMCLocalDiskBackend": {**LOCAL, "buffer_sweeper": ""},
    "storage_backend.local_backend.LocalBackendEndSignal": {},
    "storage_backend.remote_backend.LMCRemoteBackend": {**QUEUED, "list": ""},
    "storage_backend.remote_backend.LMCPipelinedRemoteBackend": {
        **QUEUED,
        "network_worker": "",
        "deserialize_worker": "",
    },
    "storage_backend.remote_backend.RemoteBackendEndSignal": {},
    "storage_backend.hybrid_backend.LMCHybridBackend": {
        "__init__": "config metadata mpool_metadata dst_device='cuda'",
        "put": "key value blocking=True",
        **{name: QUEUED[name] for name in ("contains", "get", "batched_put", "batched_get", "close")},
    },
    "storage_backend.evictor.DummyEvictor": EVICTOR,
    "storage_backend.evictor.base_evictor.BaseEvictor": EVICTOR,
    "storage_backend.evictor.base_evictor.DummyEvictor": EVICTOR,
    "storage_backend.evictor.lru_evictor.LRUEvictor": {**EVICTOR, "__init__": "max_cache_size=10.0"},
    "storage_backend.mem_pool.LocalPool": POOL,
    "storage_backend.mem_pool.LocalCPUPool": POOL,
    "storage_backend.mem_pool.LocalCPUBufferPool": POOL,
    "storage_backend.mem_pool.LocalGPUPool": POOL,
    "storage_backend.connector.base_connector.RemoteConnector": CONNECTOR,
    "storage_backend.connector.base_connector.RemoteBytesConnector": CONNECTOR,
    "storage_backend.connector.base_connector.RemoteTensorConnector": CONNECTOR,
    # The label is an extension; calls without it work as in the LMCache 0.1-0.3 API.
    "storage_backend.serde.serde.Serializer": {"to_bytes": "t label=b''"},
    "storage_backend.serde.serde.Deserializer": {"__init__": "dtype", "from_bytes": "bs label=b''"},
    "server.LMCacheServer": {},
    "server.server_storage_backend.LMSBackendInterface": {},
    "server.server_storage_backend.LMSLocalBackend": {},
    "server.server_storage_backend.LMSLocalDiskBackend": {},
    "protocol.ClientMetaMessage": {"serialize": ""},
    "protocol.ServerMetaMessage": {"serialize": ""},
    "protocol.Constants": {},
    "blend.interfaces.BlendRetrieverTask": {"result": "layer_id"},
    "blend.interfaces.BlendRetriever": {"new_request": "full_prompts indices"},
    "blend.interfaces.BlendExecutor": {
        "blend": "layer_id retrieved_k retrieved_v valid_mask original_positions fresh_q fresh_k fresh_v "
        "positions query_start_loc token_dim"
    },
    "cache_engine.LMCacheEngine": {
        "__init__": "config metadata",
        "_make_key": "chunk_hash fmt",
        "_num_tokens_in_kv": "kv_tensors fmt",
        "_get_init_hash": "",
        "_hash": "tokens prefix_hash",
        "_chunk_tokens": "tokens",
        "_prefix_hash": "token_chunks num_skip_chunk=0",
        "_tuple_kv_to_blob": "kv_tensors",
        "_blob_to_tuple_kv": "blob",
        "_slice_kv_at": "start_idx kv_tensors fmt",
        "_chunk_kv": "kv_tensors fmt",
        "_make_chunks_skip_existing": CHUNKS,
        "_make_chunks": f"{CHUNKS} skip_existing=True",
        "store": "tokens kv_tensors_raw kv_tensors_mask=None skip_existing=True blocking=True",
        "retrieve": "tokens mask=None return_tuple=True",
        "lookup": "tokens",
        "close": "",
    },
    "cache_engine.LMCacheEngineBuilder": {
        "get_or_create": "instance_id config metadata",
        "get": "instance_id",
        "destroy": "instance_id",
    },
    "config.LMCacheEngineConfig": {
        "from_legacy": "chunk_size=256 backend='cuda' max_local_cache_size=5 persist_path=None "
        "remote_serde='torch' pipelined_backend=False save_decode_cache=False",
        "from_file": "file_path",
        "from_env": "",
    },
}

FUNCTIONS = {
    "storage_backend.CreateStorageBackend": "config metadata dst_device='cuda'",
    "storage_backend.local_backend.save_disk": "path kv_chunk",
    "storage_backend.connector.CreateConnector": "url device=None",
    "storage_backend.connector.parse_remote_url": "url",
    "storage_backend.serde.CreateSerde": "serde_type config metadata",
    "logging.init_logger": "name",
    "utils._lmcache_nvtx_annotate": "func domain='lmcache'",
}

FIELDS = {
    "config.LMCacheEngineConfig": "chunk_size local_device max_local_cache_size remote_url remote_serde "
    "pipelined_backend save_decode_cache enable_blending blend_recompute_ratio blend_min_tokens "
    "blend_separator blend_add_special_in_precomp",
    "config.LMCacheEngineMetadata": "model_name world_size worker_id fmt kv_dtype kv_shape",
    "config.LMCacheMemPoolMetadata": "kv_shape kv_dtype max_local_cache_size",
    "utils.CacheEngineKey": "fmt model_name world_size worker_id chunk_hash",
    "utils.DiskCacheMetadata": "path size",
    "storage_backend.mem_pool.KVObj": "chunk_idx size data",
    "blend.interfaces.BlendOutput": "q k v positions local_indices query_start_loc",
    "blend.interfaces.BlendRetrieverResult": "k v valid_mask original_positions",
    "protocol.ClientMetaMessage": "command key length",
    "protocol.ServerMetaMessage": "code length",
}


def import_name(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"lmcache.{module}"), name)


def parameters(function) -> str:
    listed = [
        parameter for parameter in inspect.signature(function).parameters.values() if parameter.name != "self"
    ]
    empty = inspect.Parameter.empty
    return " ".join(
        parameter.name + ("" if parameter.default is empty else f"={parameter.default!r}")
        for parameter in listed
    )


NO_METHODS: dict[str, str | None] = {"__doc__": None}
METHODS = [
    (name, method, expected)
    for name, methods in CLASSES.items()
    for method, expected in (methods or NO_METHODS).items()
]


@pytest.mark.parametrize(("path", "method", "expected"), METHODS)
def test_classes_have_their_methods(path, method, expected):
    function = getattr(import_name(path), method)
    assert expected is None or parameters(function) == expected


@pytest.mark.parametrize(("path", "expected"), FUNCTIONS.items())
def test_functions_have_their_parameters(path, expected):
    assert parameters(import_name(path)) == expected


@pytest.mark.parametrize(("path", "expected"), FIELDS.items())
def test_data_classes_have_their_fields_in_order(path, expected):
    names = expected.split()
    assert list(import_name(path).__match_args__)[: len(names)] == names


def test_configuration_matches_by_position():
    match LMCacheEngineConfig.from_legacy(backend="file://local_disk/"):
        case LMCacheEngineConfig(size, local_device=str(device), remote_url=None):
            assert (size, device) == (256, "local_disk/")
        case _:
            pytest.fail("does not match")


def test_calls_of_the_vllm_integration():
    """In each step vLLM looks up and stores new KV without waiting, and retrieves behind computed blocks."""
    block = 4
    metadata = make_metadata()
    engine = LMCacheEngineBuilder.get_or_create("vllm-instance", make_config(), metadata)
    try:
        assert LMCacheEngineBuilder.get("vllm-instance") is engine
        assert (engine.chunk_size, engine.save_decode_cache, engine.metadata) == (CHUNK, False, metadata)
        assert (engine.config.enable_blending, engine.config.blend_min_tokens) == (False, 256)
        tokens, kv = make_tokens(5 * CHUNK + 3), make_kv(5 * CHUNK + 3)
        assert torch.sum(engine.retrieve(tokens, torch.ones_like(tokens, dtype=torch.bool))[1]).item() == 0
        for end in (2 * CHUNK, 5 * CHUNK + 3):  # chunked prefill
            skip = engine.lookup(tokens[:end])
            assert skip % CHUNK == 0
            mask = torch.arange(end) >= skip
            engine.store(
                tokens[:end].cpu(), cut(kv, "vllm", skip, end), mask, skip_existing=True, blocking=False
            )
        assert engine.lookup(tokens) == len(tokens)
        for num_computed in range(0, len(tokens), block):
            mask = torch.arange(len(tokens)) >= num_computed
            retrieved, retrieved_mask = engine.retrieve(tokens, mask)
            assert torch.equal(retrieved_mask, mask)
            assert is_same(retrieved, cut(kv, "vllm", num_computed))
            assert all(part.is_contiguous() for layer in retrieved for part in layer)
    finally:
        LMCacheEngineBuilder.destroy("vllm-instance")
    assert LMCacheEngineBuilder.get("vllm-instance") is None


@pytest.mark.parametrize("fmt", ["vllm", "huggingface"])
@pytest.mark.parametrize("backend", ["cpu", "cuda", "file://local_disk/"])
def test_engine_works_with_the_legacy_configuration(tmp_path, monkeypatch, backend, fmt):
    monkeypatch.chdir(tmp_path)
    config = LMCacheEngineConfig.from_legacy(chunk_size=CHUNK, backend=backend, max_local_cache_size=1 / 64)
    shape = make_metadata().kv_shape
    engine = LMCacheEngine(config, LMCacheEngineMetadata("test_model", 3, 123, fmt, torch.bfloat16, shape))
    tokens, kv = make_tokens(3 * CHUNK + 2), make_kv(3 * CHUNK + 2, fmt, dtype=torch.bfloat16)
    engine.store(tokens, kv)
    retrieved, mask = engine.retrieve(tokens)
    assert mask.all()
    assert is_same(retrieved, kv)
    engine.close()
