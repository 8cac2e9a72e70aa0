"""Faults of sidecar and Redis below running SGLang servers: no request fails, and no token is wrong."""

from __future__ import annotations

import itertools

import pytest

from lmcache.rpc import service
from testing.processes import RedisProcess
from testing.sglang.engine import PAGE_TOKENS, lmcache_storage, make_prompt
from tests.harness import sglang_world
from tests.harness.remote_objects import damage_row
from tests.harness.sglang_world import (
    Streams,
    full_pages,
    generate,
    reference,
    serving,
    serving_sidecar,
    store,
    wait_attached,
)

pytestmark = [pytest.mark.sglang, pytest.mark.redis]

NUM_TOKENS = 1000
HIT = full_pages(NUM_TOKENS)
SMALL = {"max_total_tokens": 4096, "hicache_host_memory_mode": "buffer_only", "hicache_ratio": 1.0}
"""Arguments of an engine that loads most prompts, because its own caches hold two or three of them."""
PROMPTS = [make_prompt(NUM_TOKENS, f"test_sglang_faults {number}") for number in range(12)]
SHORT_PROMPTS = [make_prompt(400, f"test_sglang_faults short {number}") for number in range(24)]
_seeds = itertools.count()


def new_prompt(num_tokens=NUM_TOKENS):
    return make_prompt(num_tokens, f"test_sglang_faults new {next(_seeds)}")


def is_hit(answer):
    return answer.cached["storage"] > 0


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def redis():
    with RedisProcess() as server:
        yield server


@pytest.fixture(scope="module")
def sidecar(redis):
    with serving_sidecar(remote_url=redis.url) as process:
        yield process


@pytest.fixture(scope="module")
def expected(logs):
    with reference(logs) as engine:
        yield engine


@pytest.fixture(scope="module")
def engine(sidecar, logs):
    with serving(logs, lmcache_storage(sidecar.socket_path), **SMALL) as server:
        wait_attached(server, sidecar)
        yield server


def assert_caches(engine, sidecar, expected):
    """Raise AssertionError unless the engine stores a prompt and loads it."""
    wait_attached(engine, sidecar)
    prompt = new_prompt()
    store(engine, prompt)
    engine.flush_cache()
    answer = generate(engine, prompt)
    assert answer.cached["storage"] == HIT
    expected.check(prompt, answer)


def test_a_sidecar_is_killed_ten_times(engine, sidecar, expected):
    with Streams(engine, expected, SHORT_PROMPTS) as streams:
        for _ in range(10):
            sidecar.kill()
            streams.wait(4)
            sidecar.start()
            streams.wait(2, is_hit)
    assert_caches(engine, sidecar, expected)


def test_a_frozen_sidecar(engine, sidecar, expected):
    with Streams(engine, expected, PROMPTS) as streams:
        streams.wait(8, is_hit)
        sidecar.freeze()
        try:
            streams.wait(40)
        finally:
            sidecar.thaw()
        streams.wait(8, is_hit)
    assert_caches(engine, sidecar, expected)


def test_a_sidecar_starts_again_with_another_size(engine, sidecar, expected):
    for size in ("128Mi", "256Mi"):
        sidecar.kill()
        sidecar.options["memory_size"] = size
        sidecar.start()
        assert_caches(engine, sidecar, expected)


def test_redis_is_killed(engine, sidecar, redis, expected):
    with Streams(engine, expected, PROMPTS) as streams:
        streams.wait(8, is_hit)
        redis.kill()
        streams.wait(8, is_hit)
        redis.start()
        streams.wait(8, is_hit)
    assert_caches(engine, sidecar, expected)


@pytest.mark.parametrize("damage", ["flipped", "foreign", "short", "random"])
def test_damaged_rows_in_redis(damage, engine, sidecar, redis, expected):
    """All rows of a prompt are damaged, and one row of another."""
    damaged, partly_damaged = new_prompt(), new_prompt()
    with redis.client as client:
        client.flushall()
        for prompt in (partly_damaged, damaged):
            before = set(client.keys())
            store(engine, prompt)
            sidecar.wait_until(lambda stats: stats["num_unwritten_rows"] == 0)
            rows = [name for name in set(client.keys()) - before if client.type(name) == b"hash"]
            assert len(rows) >= HIT // PAGE_TOKENS
            for row in rows if prompt is damaged else rows[:1]:
                damage_row(client, row, damage)
    start_without_memory(sidecar)
    wait_attached(engine, sidecar)
    engine.flush_cache()
    for prompt in (damaged, partly_damaged):
        answer = generate(engine, prompt)
        expected.check(prompt, answer)
        assert answer.cached["storage"] <= (0 if prompt is damaged else HIT)
    assert_caches(engine, sidecar, expected)


def test_a_sidecar_starts_after_the_engine(expected, logs):
    with serving_sidecar() as sidecar:
        sidecar.kill()
        with serving(logs, lmcache_storage(sidecar.socket_path)) as engine:
            prompt = new_prompt()
            answer = generate(engine, prompt)
            assert answer.num_cached_tokens == 0
            expected.check(prompt, answer)
            # A sidecar of another release: the engine runs without it, and says what to do.
            program, sidecar.program = sidecar.program, ["-c", OTHER_RELEASE]
            sidecar.start()
            sidecar_speaks = f"speaks {service.PROTOCOL_VERSION + 1}: upgrade the engine's LMCache"
            sidecar.wait_until(lambda _: sidecar_speaks in engine.log)
            expected.check(prompt, generate(engine, prompt))
            sidecar.kill()
            sidecar.program = program
            sidecar.start()
            assert_caches(engine, sidecar, expected)


OTHER_RELEASE = """
import sys
sys.path.insert(0, "sidecar")
from lmcache.rpc import service
service.PROTOCOL_VERSION += 1
from lmcache_sidecar.__main__ import main
main()
"""


def test_the_scheduler_runs_no_function_of_the_cache_that_could_wait(sidecar, expected, logs):
    """On the scheduler's thread, SGLang makes the backend, and the cache notices weight updates and requests.

    Lookups, loads and stores are on other threads.
    """
    trace = logs / "trace"
    storage = lmcache_storage(sidecar.socket_path)
    storage.extra_config.update(module_path="tests.harness.sglang_traced", class_name="TracedBackend")
    with serving(logs, storage, environment={sglang_world.TRACE: str(trace)}, **SMALL) as engine:
        wait_attached(engine, sidecar)
        with Streams(engine, expected, PROMPTS) as streams:
            streams.wait(16, is_hit)
            sidecar.freeze()
            streams.wait(16)
            sidecar.thaw()
        engine.flush_cache()
        engine.clear_storage()
    ran = set(trace.read_text().split())
    modules = {name.partition(".")[0] for name in ran}
    assert modules <= {"backend", "blocking", "keys", "page_requests", "requests", "weights"}
    called = {name.rpartition(".")[2] for name in ran if name.partition(".")[0] in ("backend", "blocking")}
    assert called <= {"guarded", "clear", "rename", "report", "set_namespace", "_release"}
    assert {"report", "set_namespace"} <= called


def test_random_delays_and_failures_of_every_call(sidecar, expected, logs):
    variable = "SGLANG_TEST_HICACHE_BACKEND_RANDOM_"
    environment = {f"{variable}DELAY": "0.05", f"{variable}FAILURE": "0.2"}
    storage = lmcache_storage(sidecar.socket_path)
    with serving(logs, storage, environment=environment, **SMALL) as engine:
        with Streams(engine, expected, PROMPTS) as streams:
            streams.wait(40)
            streams.wait(5, is_hit)
        assert_no_leases(sidecar)


def assert_no_leases(sidecar):
    sidecar.wait_until(lambda stats: not stats["memory"]["leased_rows"])


def start_without_memory(sidecar):
    sidecar.kill()
    sidecar.arena_path.unlink()
    sidecar.start()
