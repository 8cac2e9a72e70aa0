"""Updates of the weights of running SGLang servers: no KV of other weights is ever used."""

import re

import pytest

from testing.child_process import wait_until
from testing.engine.process import EngineFailed
from testing.engine.tiny_model import tiny_model
from tests.harness.scope import third
from tests.harness.sglang import updates as sglang_updates
from tests.harness.sglang.world import (
    HELD_WRITE,
    SWITCH,
    full_pages,
    generate,
    generate_all,
    load,
    new_prompt,
    other_weights,
    reference,
    serving,
    store,
    wait_attached,
    writes_held,
)

pytestmark = [pytest.mark.sglang, pytest.mark.redis]

NUM_TOKENS = 600
HIT = full_pages(NUM_TOKENS)


@pytest.fixture
def prompt():
    return new_prompt(NUM_TOKENS)


@pytest.fixture
def later_prompt():
    return new_prompt(NUM_TOKENS)


@pytest.fixture(scope="module")
def new_model():
    return other_weights(1)


@pytest.fixture(scope="module")
def expected_new(sglang, new_model):
    with reference(sglang.logs, model=new_model) as engine:
        yield engine


@pytest.fixture
def expected_old(sglang):
    return sglang.expected


@pytest.fixture
def old(sglang_engine):
    """An engine whose weights never change."""
    return sglang_engine


@pytest.fixture(scope="module")
def switch(tmp_path_factory):
    """The file with which a test holds the writes of ``engine``."""
    path = tmp_path_factory.mktemp("switch") / "switch"
    path.touch()
    return path


@pytest.fixture(scope="module")
def _updated(sglang, switch):
    storage = sglang.storage
    storage.extra_config.update(module_path="tests.harness.sglang.held_writes", class_name="HeldWrites")
    with serving(sglang.logs, storage, environment={SWITCH: str(switch)}) as engine:
        yield engine


@pytest.fixture
def engine(_updated, sglang):
    """An engine with the old weights. A test may change them, so it shares no KV with other engines."""
    wait_attached(_updated, sglang.sidecar)
    yield _updated
    _updated.update_weights_from_disk(tiny_model())


def assert_loads(engine, prompt, expected, num_tokens=HIT):
    """Raise AssertionError unless the engine loads this many tokens of a prompt, and answers right."""
    answer = load(engine, prompt)
    assert answer.cached["storage"] == num_tokens
    expected.check(prompt, answer)


def assert_computes(engine, prompt, expected):
    """Raise AssertionError unless the engine computes all of a prompt, and answers right."""
    (answer,) = store(engine, prompt)
    assert answer.num_cached_tokens == 0
    expected.check(prompt, answer)


def test_engines_share_no_kv_after_an_update(
    prompt, later_prompt, old, sglang, new_model, expected_old, expected_new
):
    store(old, prompt)
    with serving(sglang.logs, sglang.storage) as engine:
        wait_attached(engine, sglang.sidecar)
        assert_loads(engine, prompt, expected_old)
        engine.update_weights_from_disk(new_model)
        assert_computes(engine, prompt, expected_new)
        store(engine, later_prompt)
        for stored, num_old in ((prompt, HIT), (later_prompt, 0)):
            assert_loads(engine, stored, expected_new)
            assert_loads(old, stored, expected_old, num_old)


@pytest.mark.parametrize(
    "update",
    [sglang_updates.update_from_disk, sglang_updates.update_from_tensors, sglang_updates.update_from_trainer],
)
def test_an_engine_does_not_use_its_own_kv_of_older_weights(
    update, prompt, engine, new_model, expected_old, expected_new
):
    store(engine, prompt)
    assert_loads(engine, prompt, expected_old)
    update(engine, new_model)
    assert_computes(engine, prompt, expected_new)
    assert_loads(engine, prompt, expected_new)
    engine.update_weights_from_disk(tiny_model())
    assert_computes(engine, prompt, expected_old)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/update_weights_from_disk", {"model_path": "/missing"}),
        ("/update_weights_from_ipc", {"zmq_handles": {}}),  # needs a package that is not installed
    ],
)
def test_the_cache_is_closed_after_an_update_that_fails(
    path, body, prompt, later_prompt, engine, expected_old
):
    """Nothing proves that the weights are still the old ones."""
    store(engine, prompt)
    with pytest.raises(EngineFailed, match="HTTP 400"):
        engine.request("POST", path, body)
    generate(engine, new_prompt(NUM_TOKENS))
    assert_loads(engine, prompt, expected_old, 0)
    store(engine, later_prompt)
    assert_loads(engine, later_prompt, expected_old)


@pytest.mark.parametrize("pause", third([None, "retract"]))
def test_an_update_while_prompts_run_and_are_queued(pause, engine, switch, new_model, expected_new):
    """SGLang changes the weights, and refuses to empty its caches while its storage has work to do.

    It lets running requests finish before the update, unless it is paused, as trainers of reinforcement
    learning do. In both cases, pages of the old weights wait for the storage.
    """
    prompts = [new_prompt(NUM_TOKENS) for _ in range(10)]
    log_before = len(engine.log)
    with writes_held(switch):
        pending = [engine.start_generate(prompt, 256) for prompt in prompts]
        for text in (r"#queue-req: [1-9]", HELD_WRITE):
            wait_until(lambda text=text: re.search(text, engine.log[log_before:]))
        if pause:
            engine.request("POST", "/pause_generation", {"mode": pause})
        with pytest.raises(EngineFailed, match="requests are still running or queued"):
            engine.update_weights_from_disk(new_model)
    if pause:
        engine.request("POST", "/continue_generation", {})
    for answer in pending:
        answer.wait()

    def all_hit():  # SGLang does not store pages for which its host cache has no room at the moment
        engine.flush_cache()
        answers = generate_all(engine, prompts)
        for answer, prompt in zip(answers, prompts, strict=True):
            expected_new.check(prompt, answer)
        return all(answer.cached["storage"] == HIT for answer in answers)

    wait_until(all_hit)


def test_an_update_while_no_backend_is_attached(prompt, engine, sglang, new_model, expected_new):
    store(engine, prompt)
    engine.flush_cache()
    engine.detach()
    engine.update_weights_from_disk(new_model)
    engine.attach(sglang.storage)
    wait_attached(engine, sglang.sidecar)
    assert_computes(engine, prompt, expected_new)
    assert_loads(engine, prompt, expected_new)


def test_clearing_the_storage_forgets_the_kv_of_this_engine_only(
    prompt, later_prompt, old, engine, expected_old
):
    for both in (old, engine):
        generate(both, prompt)
        assert_loads(both, prompt, expected_old)
    engine.clear_storage()
    assert_loads(engine, prompt, expected_old, 0)
    assert_loads(old, prompt, expected_old)
    store(engine, later_prompt)
    assert_loads(engine, later_prompt, expected_old)


def test_kv_stays_private_if_the_cache_is_attached_to_a_running_engine(
    prompt, later_prompt, old, sglang, expected_old
):
    store(old, prompt)
    environment = sglang.storage.environment
    with serving(sglang.logs, environment=environment, enable_hierarchical_cache=True) as engine:
        engine.attach(sglang.storage)
        wait_attached(engine, sglang.sidecar)
        store(engine, later_prompt)
        assert_loads(engine, prompt, expected_old, 0)
        assert_loads(engine, later_prompt, expected_old)
        assert_loads(old, later_prompt, expected_old, 0)
        assert "attached to a running engine" in engine.log
