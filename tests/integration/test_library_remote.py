"""Engines that share real servers, which are killed, frozen and restarted."""

import contextlib

import pytest
import torch

from lmcache.cache_engine import LMCacheEngine
from testing.child_process import wait_until
from testing.processes import RedisProcess
from tests.harness.library import lm_server
from tests.harness.library.kv_cache import (
    CHUNK,
    FORMATS,
    cut,
    is_same,
    make_config,
    make_kv,
    make_metadata,
    make_tokens,
)

pytestmark = pytest.mark.redis

SERDES = ("torch", "safetensor", "fast")


@pytest.fixture(params=["redis", "lm"])
def url(request, empty_redis):
    if request.param == "redis":
        yield f"redis://127.0.0.1:{empty_redis.port}"
    else:
        with lm_server.serving() as server:
            yield f"lm://127.0.0.1:{server.port}"


@contextlib.contextmanager
def engine_over(
    url: str, local_device: str | None = None, serde: str = "torch", fmt: str = "vllm", **options
):
    config = make_config(local_device, remote_url=url, remote_serde=serde, **options)
    engine = LMCacheEngine(config, make_metadata(fmt))
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("serde", SERDES)
def test_engines_share_chunks_on_the_server(url, serde, fmt, pipelined):
    tokens, kv = make_tokens(6 * CHUNK + 5), make_kv(6 * CHUNK + 5, fmt)
    options = {"serde": serde, "fmt": fmt, "pipelined_backend": pipelined}
    with engine_over(url, **options) as writer, engine_over(url, "cpu", **options) as reader:
        writer.store(tokens, kv, blocking=False)
        wait_until(lambda: reader.lookup(tokens) == len(tokens))
        for _ in range(2):
            retrieved, is_retrieved = reader.retrieve(tokens)
            assert is_retrieved.all()
            assert is_same(retrieved, kv)
        assert len(reader.engine_.local_store.dict) == 7
        longer = torch.cat((tokens[: 2 * CHUNK], make_tokens(20, seed=1)))
        assert is_same(writer.retrieve(longer)[0], cut(kv, fmt, 0, 2 * CHUNK))


@pytest.mark.parametrize("pipelined", [False, True])
def test_defect_12_killed_server_causes_misses_until_restart(pipelined):
    tokens, kv = make_tokens(6 * CHUNK), make_kv(6 * CHUNK)
    with (
        RedisProcess() as server,
        engine_over(f"redis://127.0.0.1:{server.port}", pipelined_backend=pipelined) as engine,
    ):
        engine.store(tokens, kv)
        server.kill()
        assert engine.retrieve(tokens)[0] == ()
        assert engine.lookup(tokens) == 0
        engine.store(tokens, kv)
        engine.store(tokens, kv, blocking=False)
        server.start()
        wait_until(lambda: engine.store(tokens, kv) or engine.lookup(tokens) == len(tokens))
        assert is_same(engine.retrieve(tokens)[0], kv)


def test_closing_an_engine_writes_queued_chunks_first(url):
    tokens, kv = make_tokens(20 * CHUNK), make_kv(20 * CHUNK)
    with engine_over(url) as engine:
        engine.store(tokens, kv, blocking=False)
    with engine_over(url) as engine:
        assert is_same(engine.retrieve(tokens)[0], kv)
