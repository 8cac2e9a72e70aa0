"""SGLang servers with several ranks: tensor, pipeline and data parallelism, and MLA."""

import pytest

from testing.engine import tiny_kinds
from testing.sglang.engine import DEEPSEEK2_ARGUMENTS, patient_storage
from tests.harness.sglang.world import (
    ANSWER_TOKENS,
    SWITCH,
    full_pages,
    generate,
    generate_all,
    new_prompt,
    reference,
    serving,
    serving_sidecar,
    store,
    wait_attached,
)

pytestmark = [pytest.mark.sglang, pytest.mark.redis]

NUM_TOKENS = 600
NUM_WAITING = 24
HIT = full_pages(NUM_TOKENS)
MLA = {"model": tiny_kinds.DEEPSEEK2.path, **DEEPSEEK2_ARGUMENTS}


@pytest.fixture(scope="module")
def sidecar():
    """A sidecar with a page in one column or two, as its engines need."""
    with serving_sidecar() as process:
        yield process


@pytest.fixture
def storage(sidecar):
    return patient_storage(sidecar.socket_path)


@pytest.fixture
def prompts():
    return [new_prompt(length) for length in (65, 600, 640, 900)]


def assert_ranks(engine, sidecar, columns):
    """Wait until all ranks use the cache, and raise AssertionError unless they have these columns."""
    wait_attached(engine, sidecar, len(columns))
    processes = engine.processes()
    clients = sidecar.stats()["clients"]
    assert sorted(client["column"] for client in clients if client["pid"] in processes) == columns


def assert_loads(engine, prompts, expected, loaded=full_pages):
    """Raise AssertionError unless the engine loads these prompts from storage, and answers right."""
    engine.flush_cache()
    for prompt, answer in zip(prompts, generate_all(engine, prompts), strict=True):
        assert answer.num_cached_tokens == answer.cached["storage"] == loaded(len(prompt))
        expected.check(prompt, answer)


def test_tensor_parallel_ranks_load_the_same_pages(prompts, sglang, sidecar, storage):
    """A rank without its backend gives misses, and so do pages that it has not stored."""
    switch, other_prompt = sglang.logs / "switch", new_prompt(NUM_TOKENS)
    storage.extra_config.update(module_path="tests.harness.sglang.half_off", class_name="HalfOff")
    with serving(sglang.logs, storage, tp_size=2, environment={SWITCH: str(switch)}) as engine:
        assert_ranks(engine, sidecar, [0, 1])
        store(engine, *prompts, num_ranks=2)
        assert_loads(engine, prompts, sglang.expected)
        switch.touch()
        for _ in range(2):
            assert_loads(engine, [*prompts, other_prompt], sglang.expected, lambda _: 0)
        switch.unlink()
        assert_loads(engine, prompts, sglang.expected)
        assert_loads(engine, [other_prompt], sglang.expected, lambda _: 0)


def test_ranks_agree_while_many_prompts_wait_for_pages(sglang, sidecar, storage):
    """The ranks admit the same requests, while loads of different lengths end and requests are aborted."""
    prompts = [new_prompt(65 + 13 * number) for number in range(NUM_WAITING)]
    with serving(sglang.logs, storage, tp_size=2, max_running_requests=4) as engine:
        assert_ranks(engine, sidecar, [0, 1])
        store(engine, *prompts, num_ranks=2)
        engine.flush_cache()
        pending = [engine.start_generate(prompt, ANSWER_TOKENS, return_logprob=True) for prompt in prompts]
        for answer in pending[::5]:
            answer.abandon()
        for number, (prompt, answer) in enumerate(zip(prompts, pending, strict=True)):
            if number % 5:
                sglang.expected.check(prompt, answer.wait())
        assert_loads(engine, prompts[-4:], sglang.expected)


def test_pipeline_parallel_ranks_load_the_pages_of_an_earlier_engine(prompts, sglang, sidecar, storage):
    with serving(sglang.logs, storage, pp_size=2) as engine:
        assert_ranks(engine, sidecar, [0, 1])
        store(engine, *prompts, num_ranks=2)
        assert_loads(engine, prompts, sglang.expected)
    with serving(sglang.logs, storage, pp_size=2) as engine:
        assert_ranks(engine, sidecar, [0, 1])
        assert_loads(engine, prompts, sglang.expected)


def test_replicas_of_mla_share_kv_with_engines_of_one_rank(sglang, sidecar, storage):
    prompt, later_prompt = new_prompt(NUM_TOKENS), new_prompt(NUM_TOKENS)
    with reference(sglang.logs, **MLA) as expected:
        with serving(sglang.logs, storage, **MLA) as engine:
            assert_ranks(engine, sidecar, [0])
            store(engine, prompt)
            assert_loads(engine, [prompt], expected)
        with serving(sglang.logs, storage, **MLA, tp_size=2) as engine:
            assert_ranks(engine, sidecar, [0, 0])
            store(engine, later_prompt)
            assert_loads(engine, [prompt, later_prompt], expected)


def test_data_parallel_ranks_share_kv(sglang, sidecar, storage):
    """Each rank is an engine. Attention that is data parallel needs kernels for GPUs."""
    prompt = new_prompt(NUM_TOKENS)
    with serving(sglang.logs, storage, dp_size=2) as engine:
        assert_ranks(engine, sidecar, [0, 0])
        store(engine, prompt, data_parallel_rank=0)
        answer = generate(engine, prompt, data_parallel_rank=1)
        assert answer.cached["storage"] == HIT
        sglang.expected.check(prompt, answer)
