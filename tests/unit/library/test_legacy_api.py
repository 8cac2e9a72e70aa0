"""Names of the LMCache 0.1-0.3 API, exactly, and calls of its users."""

import functools
import importlib
import inspect
from pathlib import Path
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

NAMES = (Path(__file__).parent / "legacy_api.txt").read_text().splitlines()
"""Functions and methods with their parameters without self, data classes with their fields, and other names.

The parameter ``label`` of a serde is an extension; calls without it work as in the LMCache 0.1-0.3 API.
"""


def import_name(path: str) -> Any:
    """Import a name of a module or of a class."""
    parts = ["lmcache", *path.split(".")]
    depth = next(n for n, part in enumerate(parts) if part[0].isupper() or n == len(parts) - 1)
    return functools.reduce(getattr, parts[depth:], importlib.import_module(".".join(parts[:depth])))


def parameters(function: Any) -> str:
    listed = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    return ", ".join(str(each.replace(annotation=inspect.Parameter.empty)) for each in listed)


@pytest.mark.parametrize("line", NAMES)
def test_names_have_their_parameters_and_fields(line):
    if "(" in line:
        path, _, expected = line.partition("(")
        assert parameters(import_name(path)) + ")" == expected
        return
    path, _, fields = line.partition(": ")
    names = fields.split(", ") if fields else []
    assert list(getattr(import_name(path), "__match_args__", ()))[: len(names)] == names


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
