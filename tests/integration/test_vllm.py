"""The connector in a real vLLM with a real sidecar: loaded KV equals computed KV, byte for byte.

Equal answers prove little with a tiny model, so tests also compare the KV of every layer, in blocks that
were overwritten before the load. Two engines serve all cases:

- ``engine``: prefix caching on, its sidecar always runs
- ``small_engine``: KV memory for a few requests only; its sidecar starts late, is killed and frozen
"""

from __future__ import annotations

import itertools
import random

import pytest

from testing.child_process import wait_until
from testing.engine.process import EngineProcess, connector_config
from testing.processes import SidecarProcess

pytestmark = pytest.mark.vllm

BLOCK = 32
ANSWER_SECONDS = 30.0
"""Seconds until an engine computes an unanswered request. A busy machine must not turn hits into misses."""

SALTS = map("salt {}".format, itertools.count())


def make_prompt(num_tokens, seed=0):
    tokens = random.Random(f"{num_tokens} {seed}")
    return [tokens.randrange(4, 260) for _ in range(num_tokens)]


def cold(engine, *prompts, **options):
    """Run without hits: nothing is stored under the new salt, and KV does not depend on the salt."""
    return engine.generate(*prompts, cache_salt=next(SALTS), **options)


def assert_hit(hit, stored, num_loaded, reference=None, first_block=0):
    """Check a hit. ``stored`` stored the KV. ``reference`` computed the same prompt as ``hit``.

    The two differ if their prompts differ: batches of different shapes give KV that differs in the last bits.
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
        connector_config(
            sidecar.socket_path, answer_seconds=3.0
        ),  # shorter, because its sidecar is frozen, too
        max_model_len=2000,
        kv_cache_memory_bytes=12 << 20,  # 3,072 tokens
        max_num_batched_tokens=512,
    )


@pytest.fixture(scope="module")
def small_engine(late_sidecar, tmp_path_factory):
    with start_small_engine(late_sidecar, tmp_path_factory.mktemp("small")) as engine:
        yield engine.wait_ready()


def wait_attached(engine, sidecar):
    """Wait until the engine hits: it maps the arena a moment after the sidecar reports it as attached."""
    sidecar.wait_until(lambda stats: any(client["is_attached"] for client in stats["clients"]))
    prompt = make_prompt(256 + BLOCK, next(SALTS))

    def hits() -> bool:
        engine.scrub_kv()
        return engine.generate(prompt)[0].num_cached_tokens == 256

    wait_until(hits)
    sidecar.wait_usable()


@pytest.mark.parametrize(
    ("num_tokens", "num_loaded"),
    [(1, 0), (31, 0), (32, 0), (33, 0), (255, 0), (256, 224), (257, 256), (2048, 2016), (8192, 8160)],
)
def test_loaded_kv_equals_computed_kv(engine, num_tokens, num_loaded):
    prompt = make_prompt(num_tokens)
    (reference,) = engine.generate(prompt)
    assert reference.num_cached_tokens == 0
    engine.scrub_kv()
    (hit,) = engine.generate(prompt)
    assert_hit(hit, reference, num_loaded)


def test_engine_reports_the_phases_of_a_hit(engine):
    """The benchmark breaks the time of a hit down by phase."""
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


def test_sidecar_reports_both_clients_as_not_private(sidecar, engine):
    clients = sidecar.stats()["clients"]
    assert {client["role"] for client in clients} == {"scheduler", "worker"}
    assert {client["private_reason"] for client in clients} == {""}


def test_requests_with_another_salt_do_not_hit(engine):
    prompt = make_prompt(600)
    engine.generate(prompt)
    engine.scrub_kv()
    assert cold(engine, prompt)[0].num_cached_tokens == 0


def test_grammar_changes_the_answer_and_not_the_keys(engine):
    """Sampled tokens get keys like all others, whatever the grammar. The prompt does not depend on it."""
    prompt, letters, digits = make_prompt(700), "[a-z]{80}", "[0-9]{80}"
    (reference,) = cold(engine, prompt, max_tokens=80, regex=digits)
    (stored,) = engine.generate(prompt, max_tokens=80, regex=letters)
    (resampled,) = engine.generate(prompt, max_tokens=80, regex=digits)
    assert resampled.tokens == reference.tokens
    assert not set(stored.tokens) & set(resampled.tokens)
    engine.scrub_kv()
    (hit,) = engine.generate(prompt, max_tokens=80, regex=digits)
    assert (hit.num_cached_tokens, hit.tokens) == (512, reference.tokens)
    for previous in (stored, resampled):
        turn = prompt + previous.tokens[:-1]
        engine.scrub_kv()
        assert_hit(engine.generate(turn)[0], previous, 768, cold(engine, turn)[0])


def test_requests_share_a_prefix(engine):
    prefix = make_prompt(1024)
    first, second = prefix + make_prompt(100, 1), prefix + make_prompt(300, 2)
    (stored,) = engine.generate(first)
    (reference,) = cold(engine, second)
    engine.scrub_kv()
    assert_hit(engine.generate(second)[0], stored, 1024, reference)


def test_concurrent_requests_hit(engine):
    prompts = [make_prompt(1000, 1), make_prompt(1500, 2)]
    references = [cold(engine, prompt)[0] for prompt in prompts]
    stored = engine.generate(*prompts)
    engine.scrub_kv()
    hits = engine.generate(*prompts)
    for i, num_loaded in enumerate((768, 1280)):
        assert_hit(hits[i], stored[i], num_loaded, references[i])


def test_same_prompt_twice_concurrently_hits(engine):
    prompt = make_prompt(900)
    (stored,) = engine.generate(prompt)
    engine.scrub_kv()
    for hit in engine.generate(prompt, prompt):
        # The second request may also find blocks in the engine that the first one computed after its load.
        assert hit.num_cached_tokens in (768, 896)
        assert_hit(hit._replace(num_cached_tokens=768), stored, 768)


def test_load_continues_a_local_hit_inside_a_chunk(engine):
    prompt = make_prompt(1200)
    (reference,) = engine.generate(prompt)
    engine.scrub_kv()
    # The short prompt stores no chunk. It leaves 5 blocks in the engine, which end inside a chunk.
    assert engine.generate(prompt[:165])[0].num_cached_tokens == 0
    assert_hit(engine.generate(prompt)[0], reference, 1024, first_block=5)


def test_answer_is_a_hit_in_the_next_turn(engine):
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


def test_reset_invalidates_stored_kv_and_later_kv_is_loaded(engine):
    """The weights may have been changed in place: KV of the old weights must not be loaded."""
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


def test_engine_serves_without_a_sidecar_and_hits_once_it_starts(small_engine, late_sidecar):
    prompt = make_prompt(1000)
    (reference,) = small_engine.generate(prompt)
    assert_hit(small_engine.generate(prompt)[0], reference, 0)
    late_sidecar.start()
    wait_attached(small_engine, late_sidecar)
    small_engine.generate(prompt)
    small_engine.scrub_kv()
    assert_hit(small_engine.generate(prompt)[0], reference, 768)


def test_preempted_requests_get_the_right_answer(small_engine, late_sidecar):
    wait_attached(small_engine, late_sidecar)
    prompts = [make_prompt(480, seed) for seed in range(6)]
    references = [cold(small_engine, prompt, max_tokens=60)[0] for prompt in prompts]
    num_preemptions_before = small_engine.num_preemptions()
    for _ in range(2):  # the second round loads from the cache
        for result, reference in zip(small_engine.generate(*prompts, max_tokens=60), references, strict=True):
            assert result.tokens == reference.tokens
    assert small_engine.num_preemptions() > num_preemptions_before


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_failing_sidecar_does_not_change_answers(small_engine, late_sidecar, fault):
    wait_attached(small_engine, late_sidecar)
    prompts = [make_prompt(1100, f"{fault} {seed}") for seed in range(4)]
    references = [cold(small_engine, prompt)[0] for prompt in prompts]
    small_engine.generate(*prompts[:2])
    num_rows_before = late_sidecar.stats()["memory"]["used_rows"]
    small_engine.start_generate(*prompts)  # two of them load, two store
    late_sidecar.wait_until(
        lambda stats: stats["memory"]["used_rows"] > num_rows_before or stats["memory"]["leased_rows"]
    )
    getattr(late_sidecar, fault)()
    for result, reference in zip(small_engine.finish_generate(), references, strict=True):
        assert result.tokens == reference.tokens
        assert result.finish_reason == "length"
    for result, reference in zip(small_engine.generate(*prompts), references, strict=True):
        assert result.tokens == reference.tokens
    late_sidecar.start() if fault == "kill" else late_sidecar.thaw()
    wait_attached(small_engine, late_sidecar)
    # The connector works again without a restart of the engine.
    prompt = make_prompt(600, fault)
    wait_until(lambda: small_engine.generate(prompt)[0].num_cached_tokens == 512)
    late_sidecar.wait_until(lambda stats: stats["memory"]["leased_rows"] == 0)


def test_engine_killed_during_a_store_leaves_no_wrong_kv(small_engine, late_sidecar, tmp_path):
    wait_attached(small_engine, late_sidecar)
    prompt = make_prompt(1900)
    (reference,) = cold(small_engine, prompt)
    num_rows_before = late_sidecar.stats()["memory"]["used_rows"]
    small_engine.start_generate(prompt)
    late_sidecar.wait_until(lambda stats: stats["memory"]["used_rows"] > num_rows_before)
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
