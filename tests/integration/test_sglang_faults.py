"""Faults of sidecar and Redis below running SGLang servers: no request fails, and no token is wrong."""

import pytest

from lmcache_client.rpc import service
from testing.deadlines import CALLS
from testing.sglang.engine import lmcache_storage, make_prompt
from tests.harness.scope import third
from tests.harness.sglang import world as sglang_world
from tests.harness.sglang.world import (
    BUFFERED,
    Streams,
    full_pages,
    generate,
    load,
    new_prompt,
    serving,
    serving_sidecar,
    store,
    wait_attached,
)

DEADLINES = CALLS

pytestmark = [pytest.mark.sglang, pytest.mark.redis]

NUM_TOKENS = 600
HIT = full_pages(NUM_TOKENS)
PROMPTS = [make_prompt(NUM_TOKENS, f"test_sglang_faults {number}") for number in range(12)]
"""Together longer than the memory of the engine's device, so that most requests load."""


def is_hit(answer):
    return answer.cached["storage"] > 0


def assert_caches(engine, sglang):
    """Raise AssertionError unless the engine stores a prompt and loads it."""
    wait_attached(engine, sglang.sidecar)
    prompt = new_prompt(NUM_TOKENS)
    store(engine, prompt)
    answer = load(engine, prompt)
    assert answer.cached["storage"] == HIT
    sglang.expected.check(prompt, answer)


def test_a_sidecar_is_killed_again_and_again(sglang_buffered, sglang):
    with Streams(sglang_buffered, sglang.expected, PROMPTS) as streams:
        for _ in third(range(6)):
            sglang.sidecar.kill()
            streams.wait(4)
            sglang.sidecar.start()
            streams.wait(2, is_hit)
    assert_caches(sglang_buffered, sglang)


def test_a_sidecar_that_is_late_or_of_another_release_or_frozen(sglang):
    """Meanwhile, SGLang's scheduler runs no function of the cache that could wait.

    On the scheduler's thread, SGLang makes the backend, and the cache notices weight updates and requests.
    Lookups, loads and stores are on other threads.
    """
    trace = sglang.logs / "trace"
    with serving_sidecar() as sidecar:
        sidecar.kill()
        storage = lmcache_storage(sidecar.socket_path)  # with the deadlines of the product
        storage.extra_config.update(module_path="tests.harness.sglang.traced", class_name="TracedBackend")
        environment = {sglang_world.TRACE: str(trace)}
        with serving(sglang.logs, storage, environment=environment, **BUFFERED) as engine:
            prompt = new_prompt(NUM_TOKENS)
            answer = generate(engine, prompt)
            assert answer.num_cached_tokens == 0
            sglang.expected.check(prompt, answer)

            program, sidecar.program = sidecar.program, ("-c", OTHER_RELEASE)
            sidecar.start()
            sidecar_speaks = f"speaks {service.PROTOCOL_VERSION + 1}: upgrade the engine's LMCache"
            sidecar.wait_until(lambda _: sidecar_speaks in engine.log)
            sglang.expected.check(prompt, generate(engine, prompt))
            sidecar.kill()

            sidecar.program = program
            sidecar.start()
            wait_attached(engine, sidecar)
            with Streams(engine, sglang.expected, PROMPTS) as streams:
                streams.wait(8, is_hit)
                sidecar.freeze()
                streams.wait(16)
                sidecar.thaw()
                streams.wait(8, is_hit)
            engine.flush_cache()
            engine.clear_storage()
    ran = set(trace.read_text().split())
    modules = {name.partition(".")[0] for name in ran}
    assert modules <= {
        "adapters",
        "backend",
        "blocking",
        "errors",
        "keys",
        "off_notice",
        "page_requests",
        "requests",
        "weights",
    }
    called = {name.rpartition(".")[2] for name in ran if name.partition(".")[0] in ("backend", "blocking")}
    assert called <= {"guarded", "clear", "rename", "report", "set_namespace", "_release"}
    assert {"report", "set_namespace"} <= called


OTHER_RELEASE = """
import sys
sys.path.insert(0, "sidecar")
from lmcache_client.rpc import service
service.PROTOCOL_VERSION += 1
from lmcache_sidecar.__main__ import main
main()
"""


def test_random_delays_and_failures_of_every_call(sglang):
    variable = "SGLANG_TEST_HICACHE_BACKEND_RANDOM_"
    environment = {f"{variable}DELAY": "0.05", f"{variable}FAILURE": "0.2"}
    with (
        serving(sglang.logs, sglang.storage, environment=environment, **BUFFERED) as engine,
        Streams(engine, sglang.expected, PROMPTS) as streams,
    ):
        streams.wait(20)
        streams.wait(5, is_hit)
    sglang.sidecar.wait_until(lambda stats: not stats["memory"]["leased_rows"])
