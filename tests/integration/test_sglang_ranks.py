"""SGLang servers with several ranks: tensor, pipeline and data parallelism, and MLA."""

from __future__ import annotations

import itertools

import pytest

from testing.engine import tiny_kinds
from testing.sglang.engine import DEEPSEEK2_ARGUMENTS, lmcache_storage, make_prompt
from tests.harness.sglang_world import (
    SWITCH,
    full_pages,
    generate,
    generate_all,
    reference,
    serving,
    serving_sidecar,
    store,
    wait_attached,
)

pytestmark = pytest.mark.sglang

NUM_TOKENS = 1000
HIT = full_pages(NUM_TOKENS)
MLA = {"model": tiny_kinds.DEEPSEEK2.path, **DEEPSEEK2_ARGUMENTS}
_seeds = itertools.count()


def new_prompt(num_tokens=NUM_TOKENS):
    return make_prompt(num_tokens, f"test_sglang_ranks {next(_seeds)}")


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def expected(logs):
    with reference(logs) as engine:
        yield engine


def columns_of(sidecar):
    """Return the columns of the attached ranks."""
    return sorted(client["column"] for client in sidecar.stats()["clients"] if client["is_attached"])


@pytest.mark.parametrize(
    ("arguments", "columns", "num_that_store"),
    [
        pytest.param({"tp_size": 2}, [0, 1], 2, id="tensor parallel"),
        pytest.param({"pp_size": 2}, [0, 1], 2, id="pipeline parallel"),
    ],
)
def test_all_ranks_load_the_same_pages(arguments, columns, num_that_store, expected, logs):
    prompts = [new_prompt(length) for length in (65, 1000, 1024, 1500)]
    with serving_sidecar() as sidecar:
        storage = lmcache_storage(sidecar.socket_path)
        with serving(logs, storage, **arguments) as engine:
            wait_attached(engine, sidecar, len(columns))
            assert columns_of(sidecar) == columns
            store(engine, *prompts, num_ranks=num_that_store)
            engine.flush_cache()
            answers = generate_all(engine, prompts)
        with serving(logs, storage, **arguments) as engine:
            wait_attached(engine, sidecar, len(columns))
            answers += generate_all(engine, prompts)
            for answer, prompt in zip(answers, prompts * 2, strict=True):
                assert answer.cached["storage"] == full_pages(len(prompt))
                expected.check(prompt, answer)
            assert "offline" not in engine.log


def test_a_rank_without_its_backend_gives_misses(expected, logs):
    prompt, other_prompt = new_prompt(), new_prompt()
    switch = logs / "switch"
    with serving_sidecar() as sidecar:
        storage = lmcache_storage(sidecar.socket_path)
        storage.extra_config.update(module_path="tests.harness.sglang_half_off", class_name="HalfOff")
        with serving(logs, storage, tp_size=2, environment={SWITCH: str(switch)}) as engine:
            wait_attached(engine, sidecar, 2)
            store(engine, prompt, num_ranks=2)
            switch.touch()
            for number in range(2):
                engine.flush_cache()
                answers = generate_all(engine, [prompt, other_prompt])
                assert [answer.num_cached_tokens for answer in answers] == [0, 0], number
            switch.unlink()
            engine.flush_cache()
            answers += generate_all(engine, [prompt, other_prompt])
            assert [answer.cached["storage"] for answer in answers[2:]] == [HIT, 0]
            for answer, asked in zip(answers, [prompt, other_prompt] * 2, strict=True):
                expected.check(asked, answer)


def test_replicas_of_mla_share_kv_with_engines_of_one_rank(logs):
    prompt, later_prompt = new_prompt(), new_prompt()
    with reference(logs, **MLA) as expected, serving_sidecar() as sidecar:
        storage = lmcache_storage(sidecar.socket_path)
        with serving(logs, storage, **MLA) as engine:
            wait_attached(engine, sidecar)
            store(engine, prompt)
            engine.flush_cache()
            assert generate(engine, prompt).cached["storage"] == HIT
        with serving(logs, storage, **MLA, tp_size=2) as engine:
            wait_attached(engine, sidecar, 2)
            assert columns_of(sidecar) == [0, 0]
            store(engine, later_prompt)
            engine.flush_cache()
            for asked in (prompt, later_prompt):
                answer = generate(engine, asked)
                assert answer.cached["storage"] == HIT
                expected.check(asked, answer)


def test_data_parallel_ranks_share_kv(expected, logs):
    """Each rank is an engine. Attention that is data parallel needs kernels for GPUs."""
    prompt = new_prompt()
    with (
        serving_sidecar() as sidecar,
        serving(logs, lmcache_storage(sidecar.socket_path), dp_size=2) as engine,
    ):
        wait_attached(engine, sidecar, 2)
        assert columns_of(sidecar) == [0, 0]
        store(engine, prompt, data_parallel_rank=0)
        answer = generate(engine, prompt, data_parallel_rank=1)
        assert answer.cached["storage"] == HIT
        expected.check(prompt, answer)
