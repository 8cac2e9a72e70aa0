"""Backends that configurations create, and engines of a process by name."""

import threading

import pytest
import torch

import lmcache.cache_engine
from lmcache.cache_engine import LMCacheEngine, LMCacheEngineBuilder
from lmcache.storage_backend import CreateStorageBackend, tensors
from lmcache.storage_backend.hybrid_backend import LMCHybridBackend
from lmcache.storage_backend.local_backend import LMCLocalBackend, LMCLocalDiskBackend
from lmcache.storage_backend.remote_backend import LMCPipelinedRemoteBackend, LMCRemoteBackend
from tests.harness.library.kv_cache import DictBackend, make_config, make_metadata
from tests.harness.loops import in_threads

REMOTE = {"remote_url": "lm://localhost:1", "remote_serde": "torch"}


@pytest.fixture
def builder(monkeypatch):
    monkeypatch.setattr(lmcache.cache_engine, "CreateStorageBackend", lambda *_: DictBackend())
    yield LMCacheEngineBuilder
    LMCacheEngineBuilder.destroy("name")


# ---- backends ----


@pytest.mark.parametrize(
    ("local_device", "options", "kind"),
    [
        ("cpu", {}, LMCLocalBackend),
        ("cuda", {}, LMCLocalBackend),
        ("directory", {}, LMCLocalDiskBackend),
        (None, REMOTE, LMCRemoteBackend),
        (None, {**REMOTE, "pipelined_backend": True}, LMCPipelinedRemoteBackend),
        ("cpu", REMOTE, LMCHybridBackend),
        ("directory", REMOTE, LMCHybridBackend),
    ],
)
@pytest.mark.usefixtures("connector")
def test_creates_the_configured_backend(local_device, options, kind, tmp_path):
    if local_device == "directory":
        local_device = str(tmp_path)
    backend = CreateStorageBackend(make_config(local_device, **options), make_metadata(), "cpu")
    assert type(backend) is kind
    assert backend.dst_device == "cpu"
    backend.close()


def test_refuses_configuration_without_local_and_remote_backend():
    with pytest.raises(ValueError, match="Invalid configuration"):
        CreateStorageBackend(make_config(None), make_metadata())


def test_workers_use_separate_directories(tmp_path):
    metadata = [make_metadata(), make_metadata()]
    for worker, worker_metadata in enumerate(metadata):
        worker_metadata.world_size, worker_metadata.worker_id = 2, worker
    backends = [
        CreateStorageBackend(make_config(str(tmp_path)), worker_metadata, "cpu")
        for worker_metadata in metadata
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["worker-0", "worker-1"]
    for backend in backends:
        backend.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is available")
def test_without_cuda_chunks_are_on_the_cpu_after_a_single_warning(monkeypatch):
    lines = []
    monkeypatch.setattr(tensors.logger, "warning", lambda *line: lines.append(line))
    tensors._warn_once.cache_clear()
    for dst_device in ("cuda", "cuda:1"):
        backend = CreateStorageBackend(make_config("cuda"), make_metadata(), dst_device)
        assert backend.dst_device == "cpu"
        backend.close()
    assert len(lines) == 1
    with pytest.raises(RuntimeError):
        CreateStorageBackend(make_config("cpu"), make_metadata(), "abacus")


# ---- engines by name ----


def test_same_name_returns_the_same_engine(builder):
    engine = builder.get_or_create("name", make_config(), make_metadata())
    assert isinstance(engine, LMCacheEngine)
    assert builder.get_or_create("name", make_config(), make_metadata()) is engine
    assert builder.get("name") is engine
    assert builder.get("other") is None
    builder.destroy("name")
    assert engine.engine_.is_closed
    assert builder.get("name") is None
    builder.destroy("name")


def test_defect_27_refuses_another_configuration_for_the_name(builder):
    config = make_config()
    builder.get_or_create("name", config, make_metadata())
    config.chunk_size = 8  # the caller changes the configuration of the engine
    for other, metadata in ((config, make_metadata()), (make_config(), make_metadata("x"))):
        with pytest.raises(ValueError, match="name already exists"):
            builder.get_or_create("name", other, metadata)


def test_defect_27_forgets_engine_even_if_close_raises(builder, monkeypatch):
    engine = builder.get_or_create("name", make_config(), make_metadata())
    monkeypatch.setattr(engine.engine_, "close", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        builder.destroy("name")
    assert builder.get("name") is None
    assert builder.get_or_create("name", make_config(), make_metadata()) is not engine


def test_defect_27_concurrent_calls_create_a_single_engine(builder):
    engines, barrier = set(), threading.Barrier(8)

    def get(_: int) -> None:
        barrier.wait()
        engines.add(builder.get_or_create("name", make_config(), make_metadata()))

    in_threads(get, range(8))
    assert len(engines) == 1
