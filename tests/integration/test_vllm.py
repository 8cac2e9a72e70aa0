"""The connector in a real vLLM with a real sidecar: what is loaded is what was computed, byte for byte.

Equal answers prove little with a tiny model, so the KV of every layer is compared too, over blocks that were
overwritten before the load. Three engines serve all cases:

- ``engine``: prefix caching on, sidecar always there
- ``small_engine``: KV for a few requests only; its sidecar comes late, is killed and frozen
- a ``vllm serve`` of two ranks over HTTP
"""

from __future__ import annotations

import itertools
import json
import random
import socket

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import KVEventBatch

from testing.child_process import wait_until
from testing.engine.process import EngineProcess, ServedEngine, connector_config
from testing.processes import SidecarProcess

pytestmark = pytest.mark.vllm

BLOCK = 32
ANSWER_SECONDS = 30.0
"""Seconds until an unanswered request is computed: a busy machine must not turn hits into misses."""

SALTS = map("salt {}".format, itertools.count())


def make_prompt(num_tokens, seed=0):
    tokens = random.Random(f"{num_tokens} {seed}")
    return [tokens.randrange(4, 260) for _ in range(num_tokens)]


def cold(engine, *prompts, **options):
    """Run without hits: nothing is stored under a new salt, and KV does not depend on it."""
    return engine.generate(*prompts, cache_salt=next(SALTS), **options)


def assert_hit(hit, stored, num_loaded, reference=None, first_block=0):
    """``stored`` is the request whose KV was stored; ``reference`` the same prompt as ``hit``, computed.

    They differ where prompts differ: KV computed in batches of other shapes differs in the last bits.
    """
    reference = reference or stored
    assert hit.num_cached_tokens == num_loaded
    assert hit.tokens == reference.tokens
    assert hit.logprobs == pytest.approx(reference.logprobs, abs=1e-4)
    end_block = num_loaded // BLOCK
    for layer, (loaded, computed) in enumerate(zip(hit.kv, stored.kv, strict=True)):
        assert len(loaded) >= end_block
        assert loaded[first_block:end_block] == computed[first_block:end_block], f"layer {layer}"


@pytest.fixture(scope="module")
def sidecar():
    with SidecarProcess(memory_size="256Mi") as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def engine(sidecar, tmp_path_factory):
    log = tmp_path_factory.mktemp("engine") / "log"
    config = connector_config(sidecar.socket_path, answer_seconds=ANSWER_SECONDS)
    with EngineProcess(log, config, enable_prefix_caching=True) as engine:
        engine.wait_ready()
        wait_attached(engine, sidecar)
        yield engine


@pytest.fixture(scope="module")
def late_sidecar():
    sidecar = SidecarProcess(memory_size="256Mi")
    yield sidecar
    sidecar.close()


def start_small_engine(sidecar, folder):
    return EngineProcess(
        folder / "log",
        connector_config(sidecar.socket_path, answer_seconds=3.0),  # its sidecar is frozen, too
        max_model_len=2000,
        kv_cache_memory_bytes=12 << 20,  # 3,072 tokens
        max_num_batched_tokens=512,
    )


@pytest.fixture(scope="module")
def small_engine(late_sidecar, tmp_path_factory):
    with start_small_engine(late_sidecar, tmp_path_factory.mktemp("small")) as engine:
        yield engine.wait_ready()


def wait_attached(engine, sidecar):
    """Until the engine hits: it has mapped the arena a moment after the sidecar calls it attached."""
    sidecar.wait_until(lambda stats: len([c for c in stats["clients"] if c["is_attached"]]) >= 2)
    prompt = make_prompt(256 + BLOCK, next(SALTS))

    def hits() -> bool:
        engine.scrub_kv()
        return engine.generate(prompt)[0].num_cached_tokens == 256

    wait_until(hits)


@pytest.mark.parametrize(
    ("num_tokens", "num_loaded"),
    [(1, 0), (31, 0), (32, 0), (33, 0), (255, 0), (256, 224), (257, 256), (2048, 2016), (8192, 8160)],
)
def test_a_hit_is_what_was_computed(engine, num_tokens, num_loaded):
    prompt = make_prompt(num_tokens)
    (reference,) = engine.generate(prompt)
    assert reference.num_cached_tokens == 0
    engine.scrub_kv()
    (hit,) = engine.generate(prompt)
    assert_hit(hit, reference, num_loaded)


def test_the_phases_of_a_hit_are_timed(engine):
    """The benchmark shows where the time of a hit goes."""
    prompt = make_prompt(2000)
    engine.generate(prompt)
    engine.scrub_kv()
    (hit,) = engine.generate(prompt, max_tokens=1)
    assert hit.num_cached_tokens == 1792
    phases = engine.phases()
    assert [len(phases[phase]) for phase in ("arrival", "load", "computing")] == [1, 1, 1]
    assert phases["idle"]
    steps = phases["arrival"] + phases["idle"] + phases["computing"]
    assert max(phases["load"]) < sum(steps) <= hit.ended


def test_keys_are_shared_and_the_sidecar_knows_the_engine(sidecar, engine):
    clients = sidecar.stats()["clients"]
    assert {client["role"] for client in clients} == {"scheduler", "worker"}
    assert {client["private_reason"] for client in clients} == {""}


def test_a_salt_separates(engine):
    prompt = make_prompt(600)
    engine.generate(prompt)
    engine.scrub_kv()
    assert cold(engine, prompt)[0].num_cached_tokens == 0


def test_a_grammar_shapes_the_answer_and_no_kv(engine):
    """What is sampled under it is named by its tokens, as all else; the prompt does not depend on it."""
    prompt, letters, digits = make_prompt(700), "[a-z]{80}", "[0-9]{80}"
    (reference,) = cold(engine, prompt, max_tokens=80, regex=digits)
    (stored,) = engine.generate(prompt, max_tokens=80, regex=letters)
    (other,) = engine.generate(prompt, max_tokens=80, regex=digits)
    assert other.tokens == reference.tokens
    assert not set(stored.tokens) & set(other.tokens)
    engine.scrub_kv()
    (hit,) = engine.generate(prompt, max_tokens=80, regex=digits)
    assert (hit.num_cached_tokens, hit.tokens) == (512, reference.tokens)
    for answered in (stored, other):
        turn = prompt + answered.tokens[:-1]
        engine.scrub_kv()
        assert_hit(engine.generate(turn)[0], answered, 768, cold(engine, turn)[0])


def test_two_requests_share_a_prefix(engine):
    prefix = make_prompt(1024)
    first, second = prefix + make_prompt(100, 1), prefix + make_prompt(300, 2)
    (stored,) = engine.generate(first)
    (reference,) = cold(engine, second)
    engine.scrub_kv()
    assert_hit(engine.generate(second)[0], stored, 1024, reference)


def test_two_requests_at_once(engine):
    prompts = [make_prompt(1000, 1), make_prompt(1500, 2)]
    references = [cold(engine, prompt)[0] for prompt in prompts]
    stored = engine.generate(*prompts)
    engine.scrub_kv()
    hits = engine.generate(*prompts)
    for i, num_loaded in enumerate((768, 1280)):
        assert_hit(hits[i], stored[i], num_loaded, references[i])


def test_the_same_prompt_twice_at_once(engine):
    prompt = make_prompt(900)
    (stored,) = engine.generate(prompt)
    engine.scrub_kv()
    for hit in engine.generate(prompt, prompt):
        # The second may find in the engine what the first has computed after its load.
        assert hit.num_cached_tokens in (768, 896)
        assert_hit(hit._replace(num_cached_tokens=768), stored, 768)


def test_a_load_continues_a_local_hit_inside_a_chunk(engine):
    prompt = make_prompt(1200)
    (reference,) = engine.generate(prompt)
    engine.scrub_kv()
    # Too short to be loaded itself: leaves 5 blocks in the engine, which is not the edge of a chunk.
    assert engine.generate(prompt[:165])[0].num_cached_tokens == 0
    assert_hit(engine.generate(prompt)[0], reference, 1024, first_block=5)


def test_the_answer_is_the_next_turn_s_prompt(engine):
    prompt = make_prompt(400)
    (turn,) = engine.generate(prompt, max_tokens=150)
    following = prompt + turn.tokens + make_prompt(50, 1)
    (reference,) = cold(engine, following)
    engine.scrub_kv()
    assert_hit(engine.generate(following)[0], turn, 512, reference)


def test_prompt_logprobs_are_computed_and_not_loaded(engine):
    prompt = make_prompt(520)
    engine.generate(prompt)
    engine.scrub_kv()
    assert engine.generate(prompt, prompt_logprobs=1)[0].num_cached_tokens == 0


def test_after_a_reset_nothing_from_before_is_loaded_and_what_is_computed_then_is(engine):
    """The weights may have been changed in place: their old KV is none of theirs."""
    prompt = make_prompt(1000)
    (reference,) = engine.generate(prompt)
    engine.scrub_kv()
    assert_hit(engine.generate(prompt)[0], reference, 768)
    engine.scrub_kv()
    assert engine.reset_caches() is True
    (computed,) = engine.generate(prompt)
    assert computed.num_cached_tokens == 0
    engine.scrub_kv()
    assert_hit(engine.generate(prompt)[0], computed, 768)


def test_without_a_sidecar_and_when_it_comes(small_engine, late_sidecar):
    prompt = make_prompt(1000)
    (reference,) = small_engine.generate(prompt)
    assert_hit(small_engine.generate(prompt)[0], reference, 0)
    late_sidecar.start()
    wait_attached(small_engine, late_sidecar)
    small_engine.generate(prompt)
    small_engine.scrub_kv()
    assert_hit(small_engine.generate(prompt)[0], reference, 768)


def test_preempted_requests_answer_right(small_engine, late_sidecar):
    wait_attached(small_engine, late_sidecar)
    prompts = [make_prompt(480, seed) for seed in range(6)]
    references = [cold(small_engine, prompt, max_tokens=60)[0] for prompt in prompts]
    before = small_engine.num_preemptions()
    for _ in range(2):  # the second time from the cache
        for result, reference in zip(small_engine.generate(*prompts, max_tokens=60), references, strict=True):
            assert result.tokens == reference.tokens
    assert small_engine.num_preemptions() > before


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_a_sidecar_that_fails_in_the_middle_costs_only_computing(small_engine, late_sidecar, fault):
    wait_attached(small_engine, late_sidecar)
    prompts = [make_prompt(1100, f"{fault} {seed}") for seed in range(4)]
    references = [cold(small_engine, prompt)[0] for prompt in prompts]
    small_engine.generate(*prompts[:2])
    used = late_sidecar.stats()["memory"]["used_rows"]
    small_engine.start_generate(*prompts)  # two of them load, two store
    late_sidecar.wait_until(
        lambda stats: stats["memory"]["used_rows"] > used or stats["memory"]["leased_rows"]
    )
    getattr(late_sidecar, fault)()
    for result, reference in zip(small_engine.finish_generate(), references, strict=True):
        assert result.tokens == reference.tokens
        assert result.finish_reason == "length"
    for result, reference in zip(small_engine.generate(*prompts), references, strict=True):
        assert result.tokens == reference.tokens
    late_sidecar.start() if fault == "kill" else late_sidecar.thaw()
    wait_attached(small_engine, late_sidecar)
    # Back again without a restart of the engine.
    prompt = make_prompt(600, fault)
    wait_until(lambda: small_engine.generate(prompt)[0].num_cached_tokens == 512)
    late_sidecar.wait_until(lambda stats: stats["memory"]["leased_rows"] == 0)


def test_an_engine_killed_in_mid_store_leaves_nothing_wrong(small_engine, late_sidecar, tmp_path):
    wait_attached(small_engine, late_sidecar)
    prompt = make_prompt(1900)
    (reference,) = cold(small_engine, prompt)
    used = late_sidecar.stats()["memory"]["used_rows"]
    small_engine.start_generate(prompt)
    late_sidecar.wait_until(lambda stats: stats["memory"]["used_rows"] > used)
    small_engine.kill()
    late_sidecar.wait_until(lambda stats: not any(client["is_attached"] for client in stats["clients"]))
    late_sidecar.wait_until(lambda stats: stats["memory"]["quarantined_slots"] == 0)
    with start_small_engine(late_sidecar, tmp_path) as engine:
        engine.wait_ready()
        wait_attached(engine, late_sidecar)
        (result,) = engine.generate(prompt)
        assert_hit(result, reference, result.num_cached_tokens)
        engine.scrub_kv()
        assert_hit(engine.generate(prompt)[0], reference, 1792)


def test_two_ranks_over_http(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{tmp_path}/events"}
    listener = zmq.Context.instance().socket(zmq.SUB)
    listener.subscribe("")
    listener.connect(events["endpoint"])
    with (
        listener,
        SidecarProcess(memory_size="64Mi") as sidecar,
        ServedEngine(
            tmp_path / "log",
            port,
            connector_config(sidecar.socket_path, answer_seconds=ANSWER_SECONDS),
            "--tensor-parallel-size=2",
            f"--kv-events-config={json.dumps(events)}",
            environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        ) as engine,
    ):
        engine.wait_ready()
        attached = make_prompt(600, "attached")
        # The sidecar calls clients attached before they know it themselves.
        wait_until(lambda: num_cached(engine.complete(attached)) == 512, timeout=300)
        wait_until(lambda: engine.metrics("vllm:lmcache_")["vllm:lmcache_stored_rows_total"] >= 2 * 2)
        numbers = itertools.count()
        prompt, before, first = wait_until(
            lambda: stored_whole(engine, make_prompt(2000, next(numbers)), 2 * 7), timeout=300
        )
        # A worker counts a row when it has sent the commit. Lookups find the row after both ranks' commits.
        sidecar.wait_until(lambda stats: stats["memory"]["used_rows"] >= 2 + 7)
        second = engine.complete(prompt)
        assert (num_cached(first), num_cached(second)) == (0, 1792)
        assert second["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
        assert {client["column"] for client in sidecar.stats()["clients"]} == {0, 1}
        assert_told(listener, prompt)
        after = engine.metrics("vllm:lmcache_")
        figures = {name.removeprefix("vllm:lmcache_"): after[name] - before[name] for name in after}
        assert figures["loads_total"] == 2, "of both ranks"
        assert figures["failed_loads_total"] == 0
        assert figures["loaded_blocks_total"] == 2 * 1792 // BLOCK
        assert figures["stored_rows_total"] == 2 * 7
        assert figures["load_seconds_total"] > 0


def stored_whole(engine, prompt, num_rows):
    """The prompt, the metrics before it and its answer, if so many rows were stored. A busy machine may store
    a part of them: blocks of a request that has ended are held for two seconds."""
    before = engine.metrics("vllm:lmcache_")
    answer = engine.complete(prompt)
    name = "vllm:lmcache_stored_rows_total"
    try:
        wait_until(lambda: engine.metrics("vllm:lmcache_")[name] >= before[name] + num_rows, timeout=10)
    except AssertionError:
        return None
    return prompt, before, answer


def num_cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def assert_told(listener, prompt):
    """What vLLM's own publisher sent of the sidecar's memory is the prompt, each chunk once."""
    listener.setsockopt(zmq.RCVTIMEO, 30_000)
    told, decoder = [], msgspec.msgpack.Decoder(KVEventBatch)
    chunks = [prompt[start : start + 256] for start in range(0, 7 * 256, 256)]
    while len(told) < 7:
        *_, payload = listener.recv_multipart()
        events = decoder.decode(payload).events
        told += [event for event in events if event.medium == "CPU" and event.token_ids in chunks]
    parent = None
    for number, event in enumerate(told):
        assert event.parent_block_hash == parent
        assert event.token_ids == chunks[number]
        assert (event.block_size, len(event.block_hashes)) == (BLOCK, 256 // BLOCK)
        parent = event.block_hashes[-1]
