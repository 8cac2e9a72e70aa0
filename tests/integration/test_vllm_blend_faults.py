"""Faults while a real vLLM blends: answers stay right, nothing hangs, and nothing stays leased.

Whatever part of the KV is reused, layer 0 has the KV of a full prefill: its K and V depend on the token and
its position alone. An answer that recomputed all tokens, or reused none, equals the exact answer.
"""

import pytest

from testing.child_process import wait_until
from testing.engine.environment import LOAD_GATE
from testing.engine.process import EngineFailed, connector_config
from testing.processes import SidecarProcess
from tests.harness.client.blended import (
    Prompt,
    announce,
    blended,
    differences,
    kv_of,
    make_tokens,
    saved_kv,
)
from tests.harness.client.real_engine import attached_engine, cold, make_prompt, wait_hit

pytestmark = pytest.mark.vllm

MAX_STEPS = 200


@pytest.fixture(scope="module")
def sidecar():
    sidecar = SidecarProcess(memory_size="512Mi")
    sidecar.start()
    yield sidecar
    sidecar.close()


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    """A file that stops all loads of the engine while it exists."""
    return tmp_path_factory.mktemp("faults") / "gate"


@pytest.fixture(scope="module")
def engine(sidecar, gate):
    """An engine with KV memory for a few requests, in small steps."""
    options = {
        "max_model_len": 2000,
        "kv_cache_memory_bytes": 12 << 20,  # 3,072 tokens
        "max_num_batched_tokens": 256,
        "enable_prefix_caching": True,
        "environment": {LOAD_GATE: str(gate)},
    }
    config = connector_config(sidecar.socket_path, blend="request", answer_seconds=3.0)
    with attached_engine(sidecar, gate.parent, config, **options) as engine:
        yield engine


@pytest.fixture
def prompt(engine, sidecar):
    """A prompt of announced documents."""
    if not sidecar.is_running:
        sidecar.start()
    wait_hit(engine, sidecar)
    documents = make_tokens(500), make_tokens(400)
    announce(engine, sidecar, *documents)
    engine.scrub_kv()
    return Prompt.of(*documents)


def num_reused(answer):
    """Tokens whose KV was used as it was stored. Without them the answer is exact."""
    return blended(answer).get("tokens", 0)


def assert_nothing_is_left(engine, sidecar):
    """All leases are released, and all blocks are free."""
    sidecar.wait_until(lambda stats: stats["memory"]["leased_rows"] == 0)
    engine.scrub_kv()  # raises if a block is in use


@pytest.mark.parametrize("selection", ["none", "all"])
@pytest.mark.parametrize("fault", ["kill", "restart", "freeze"])
def test_sidecar_that_fails_during_the_load(engine, sidecar, gate, prompt, tmp_path, fault, selection):
    decoding = {"prompt": make_tokens(40), "max_tokens": 60}
    with saved_kv(engine, tmp_path):
        (full,) = cold(engine, prompt.tokens)
        (alone,) = engine.run([decoding])
        engine.scrub_kv()
        gate.touch()
        engine.start([prompt.request(selection), decoding])
        wait_until(lambda: gate.stat().st_size, what="a load")
        if fault == "restart":  # its arena is another one
            sidecar.kill()
            sidecar.arena_path.unlink()
            sidecar.start()
        else:
            getattr(sidecar, fault)()
        gate.unlink()
        answer, decoded = engine.finish_generate()
    if fault == "freeze":
        sidecar.thaw()
    assert decoded.tokens == alone.tokens
    assert differences(kv_of(answer, tmp_path), kv_of(full, tmp_path))[0] <= 1e-4
    if selection == "all" or not num_reused(answer):
        assert answer.tokens == full.tokens
        assert answer.logprobs == pytest.approx(full.logprobs, abs=1e-4)
    if not sidecar.is_running:
        sidecar.start()
    wait_hit(engine, sidecar)
    assert_nothing_is_left(engine, sidecar)


def test_sidecar_that_died_before_the_request(engine, sidecar, prompt):
    (full,) = cold(engine, prompt.tokens)
    sidecar.kill()
    answer = prompt.ask(engine)
    assert not num_reused(answer)
    assert answer.tokens == full.tokens
    assert answer.logprobs == pytest.approx(full.logprobs, abs=1e-4)


@pytest.mark.parametrize("fault", ["abort", "kill", "freeze"])
def test_fault_while_documents_are_taken_out_of_a_prompt(engine, sidecar, prompt, fault):
    """No document is stored. Aborts come in each step, other faults while the prompt is computed."""
    for num_steps in range(1, 8) if fault == "abort" else (0,):
        unknown = Prompt.of(make_tokens(300), make_tokens(200))
        (full,) = cold(engine, unknown.tokens)
        engine.scrub_kv()
        engine.start([unknown.request() | ({"num_steps": num_steps} if num_steps else {})])
        if not num_steps:
            getattr(sidecar, fault)()
        (answer,) = engine.finish_generate()
        assert not blended(answer)
        assert answer.tokens == full.tokens[: len(answer.tokens)]
        assert (answer.finish_reason == "abort") == bool(num_steps)
        if num_steps:
            engine.scrub_kv()  # raises if a block is in use
    if fault == "freeze":
        sidecar.thaw()
    if not sidecar.is_running:
        sidecar.start()
    wait_hit(engine, sidecar)
    assert_nothing_is_left(engine, sidecar)


@pytest.mark.parametrize("selection", ["all", "attended"])
def test_abort_in_each_step(engine, sidecar, prompt, selection):
    """Another request decodes meanwhile, and the engine's blocks are used again by the next one."""
    decoding = {"prompt": make_tokens(40), "max_tokens": 30}
    (alone,) = engine.run([decoding])
    expected = prompt.ask(engine, selection)
    for num_steps in range(MAX_STEPS):
        engine.scrub_kv()
        answer, decoded = engine.run([prompt.request(selection, num_steps=num_steps), decoding])
        assert decoded.tokens == alone.tokens
        if answer.finish_reason != "abort":
            break
        assert not answer.tokens
    else:
        raise AssertionError("the prompt never ends")
    assert num_steps > 3
    assert answer.tokens == expected.tokens
    assert blended(answer) == blended(expected)
    assert_nothing_is_left(engine, sidecar)


def run_with_reset(engine, request, step, pauses):
    """Run a request, and reset all caches after this step. Returns None if the request ends before."""
    try:
        (answer,) = engine.run([request], reset_after=step, pauses=pauses)
    except EngineFailed as error:
        if "could not be reset while requests ran" not in str(error):
            raise
        return None
    return answer


@pytest.mark.parametrize("pauses", [False, True])
def test_reset_in_each_step(engine, sidecar, prompt, pauses):
    """KV of documents may be that of old weights after the reset, so the answer is exact."""
    (full,) = cold(engine, prompt.tokens)
    engine.reset_caches()
    for step in range(1, MAX_STEPS):
        engine.scrub_kv()
        announce(engine, sidecar, *prompt.documents)  # the last reset has dropped them
        answer = run_with_reset(engine, prompt.request("all"), step, pauses)
        if answer is None:
            break
        assert answer.tokens == full.tokens
    else:
        raise AssertionError("the prompt never ends")
    assert step > 3
    assert_nothing_is_left(engine, sidecar)


def test_preemption_of_other_requests(engine, sidecar, prompt):
    """The rivals need more memory than the engine has, so that some wait, and some are preempted."""
    rivals = [{"prompt": make_prompt(480, seed), "max_tokens": 60} for seed in range(6)]
    requests = [*rivals[:4], prompt.request("all", max_tokens=60, first_step=3), *rivals[4:]]
    alone = []
    for request in requests:
        engine.scrub_kv()
        alone += engine.run([request | {"first_step": 1}])
    engine.scrub_kv()
    num_preemptions_before = engine.num_preemptions()
    for result, expected in zip(engine.run(requests), alone, strict=True):
        assert result.tokens == expected.tokens
    assert engine.num_preemptions() > num_preemptions_before
    assert_nothing_is_left(engine, sidecar)
