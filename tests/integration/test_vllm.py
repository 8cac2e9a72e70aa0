"""The connector in a real vLLM with a real sidecar: loaded KV equals computed KV, byte for byte.

Equal answers prove little with a tiny model, so tests also compare the KV of every layer, in blocks that
were overwritten before the load. Two engines serve all cases:

- ``engine``: prefix caching on, its sidecar always runs
- ``small_engine``: KV memory for a few requests only; its sidecar starts late, is killed and frozen
"""

import pytest

from testing.child_process import wait_until
from testing.engine.process import EngineProcess, connector_config
from testing.processes import SidecarProcess
from tests.harness.client.real_engine import assert_hit, attached_engine, cold, make_prompt, wait_hit

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def sidecar():
    with SidecarProcess(memory_size="256Mi") as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def engine(sidecar, tmp_path_factory):
    with attached_engine(sidecar, tmp_path_factory.mktemp("engine"), enable_prefix_caching=True) as engine:
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


class SmallEngine:
    """The engine. ``running`` starts it and its sidecar again if a test has ended them."""

    def __init__(self, sidecar, folder):
        self.sidecar, self.folder = sidecar, folder
        self.process = start_small_engine(sidecar, folder).wait_ready()

    def running(self):
        if not self.sidecar.is_running:
            self.sidecar.start()
        if not self.process.is_running:
            self.process.close()
            self.process = start_small_engine(self.sidecar, self.folder)
        wait_hit(self.process, self.sidecar)
        return self.process


@pytest.fixture(scope="module")
def small(late_sidecar, tmp_path_factory):
    small = SmallEngine(late_sidecar, tmp_path_factory.mktemp("small"))
    yield small
    small.process.close()


@pytest.fixture
def small_engine(small):
    return small.running()


@pytest.mark.parametrize(
    ("num_tokens", "num_loaded"),
    [(1, 0), (31, 0), (32, 0), (33, 0), (255, 0), (256, 224), (257, 256), (4096, 4064)],
)
def test_loaded_kv_equals_computed_kv(engine, num_tokens, num_loaded):
    prompt = make_prompt(num_tokens)
    (reference,) = engine.generate(prompt)
    assert reference.num_cached_tokens == 0
    engine.scrub_kv()
    (hit,) = engine.generate(prompt)
    assert_hit(hit, reference, num_loaded)


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


def test_load_continues_a_local_hit_inside_a_chunk(engine):
    prompt = make_prompt(1200)
    (reference,) = engine.generate(prompt)
    engine.scrub_kv()
    # The short prompt stores no chunk. It leaves 5 blocks in the engine, which end inside a chunk.
    assert engine.generate(prompt[:165])[0].num_cached_tokens == 0
    assert_hit(engine.generate(prompt)[0], reference, 1024, first_block=5)


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


def test_engine_serves_without_a_sidecar_and_hits_once_it_starts(small, late_sidecar):
    late_sidecar.kill()
    prompt = make_prompt(1000)
    (reference,) = small.process.generate(prompt)
    assert_hit(small.process.generate(prompt)[0], reference, 0)
    engine = small.running()
    engine.generate(prompt)
    engine.scrub_kv()
    assert_hit(engine.generate(prompt)[0], reference, 768)


def test_preempted_requests_get_the_right_answer(small_engine):
    prompts = [make_prompt(480, seed) for seed in range(6)]
    references = [cold(small_engine, prompt, max_tokens=60)[0] for prompt in prompts]
    num_preemptions_before = small_engine.num_preemptions()
    for _ in range(2):  # the second round loads from the cache
        for result, reference in zip(small_engine.generate(*prompts, max_tokens=60), references, strict=True):
            assert result.tokens == reference.tokens
    assert small_engine.num_preemptions() > num_preemptions_before


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_failing_sidecar_does_not_change_answers(small, small_engine, late_sidecar, fault):
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
    if fault == "freeze":
        late_sidecar.thaw()
    # The connector works again without a restart of the engine.
    assert small.running() is small_engine
    prompt = make_prompt(600, fault)
    wait_until(lambda: small_engine.generate(prompt)[0].num_cached_tokens == 512)
    late_sidecar.wait_until(lambda stats: stats["memory"]["leased_rows"] == 0)


def test_engine_killed_during_a_store_leaves_no_wrong_kv(small, small_engine, late_sidecar):
    prompt = make_prompt(1900)
    (reference,) = cold(small_engine, prompt)
    num_rows_before = late_sidecar.stats()["memory"]["used_rows"]
    small_engine.start_generate(prompt)
    late_sidecar.wait_until(lambda stats: stats["memory"]["used_rows"] > num_rows_before)
    small_engine.kill()
    late_sidecar.wait_until(lambda stats: not any(client["is_attached"] for client in stats["clients"]))
    late_sidecar.wait_until(lambda stats: stats["memory"]["quarantined_slots"] == 0)
    engine = small.running()
    (result,) = engine.generate(prompt)
    assert_hit(result, reference, result.num_cached_tokens)
    wait_until(lambda: engine.generate(prompt)[0].num_cached_tokens == 1792, what="a hit")
    engine.scrub_kv()
    assert_hit(engine.generate(prompt)[0], reference, 1792)
