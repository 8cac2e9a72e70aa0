"""Updates of the weights of running SGLang servers: no KV of other weights is ever used."""

from __future__ import annotations

import itertools
import re

import pytest

from testing.child_process import wait_until
from testing.engine.process import EngineFailed
from testing.engine.tiny_model import tiny_model
from testing.sglang.engine import lmcache_storage, make_prompt
from tests.harness import sglang_updates
from tests.harness.sglang_world import (
    full_pages,
    generate,
    generate_all,
    other_weights,
    reference,
    serving,
    serving_sidecar,
    store,
    wait_attached,
)

pytestmark = pytest.mark.sglang

NUM_TOKENS = 1000
HIT = full_pages(NUM_TOKENS)
_seeds = itertools.count()


def new_prompt(num_tokens=NUM_TOKENS):
    return make_prompt(num_tokens, f"test_sglang_weights {next(_seeds)}")


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def sidecar():
    with serving_sidecar() as process:
        yield process


@pytest.fixture(scope="module")
def new_model():
    return other_weights(1)


@pytest.fixture(scope="module")
def expected_old(logs):
    with reference(logs) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected_new(logs, new_model):
    with reference(logs, model=new_model) as engine:
        yield engine


@pytest.fixture(scope="module")
def old(sidecar, logs):
    """An engine whose weights never change."""
    with serving(logs, lmcache_storage(sidecar.socket_path)) as engine:
        wait_attached(engine, sidecar)
        yield engine


@pytest.fixture(scope="module")
def _updated(sidecar, logs, new_model):
    with serving(logs, lmcache_storage(sidecar.socket_path)) as engine:
        wait_attached(engine, sidecar)
        yield engine


@pytest.fixture
def engine(_updated):
    """An engine with the old weights. A test may change them."""
    yield _updated
    _updated.update_weights_from_disk(tiny_model())


def load(engine, prompt):
    """Run a prompt that SGLang's own caches do not have. Returns the answer and the loaded tokens."""
    engine.flush_cache()
    answer = generate(engine, prompt)
    return answer, answer.cached["storage"]


def test_engines_share_no_kv_after_an_update(old, engine, new_model, expected_old, expected_new):
    prompt, later_prompt = new_prompt(), new_prompt()
    store(old, prompt)
    answer, num_loaded = load(engine, prompt)
    assert num_loaded == HIT
    expected_old.check(prompt, answer)

    engine.update_weights_from_disk(new_model)
    (answer,) = store(engine, prompt)
    assert answer.num_cached_tokens == 0
    expected_new.check(prompt, answer)
    store(engine, later_prompt)
    for number, stored in enumerate((prompt, later_prompt)):
        answer, num_loaded = load(engine, stored)
        assert num_loaded == HIT
        expected_new.check(stored, answer)
        answer, num_loaded = load(old, stored)
        assert num_loaded == (HIT, 0)[number]
        expected_old.check(stored, answer)


@pytest.mark.parametrize(
    "update",
    [
        sglang_updates.update_from_disk,
        sglang_updates.update_from_tensors,
        sglang_updates.update_from_trainer,
    ],
)
def test_an_engine_does_not_use_its_own_kv_of_older_weights(
    update, engine, new_model, expected_old, expected_new
):
    prompt = new_prompt()
    store(engine, prompt)
    assert load(engine, prompt)[1] == HIT
    update(engine, new_model)
    (answer,) = store(engine, prompt)
    assert answer.num_cached_tokens == 0
    expected_new.check(prompt, answer)
    answer, num_loaded = load(engine, prompt)
    assert num_loaded == HIT
    expected_new.check(prompt, answer)
    engine.update_weights_from_disk(tiny_model())
    answer = generate(engine, prompt)
    assert answer.num_cached_tokens == 0
    expected_old.check(prompt, answer)


def test_the_cache_is_closed_until_sglang_empties_its_own_caches(engine, sidecar, new_model, expected_new):
    prompt = new_prompt()
    engine.update_weights_from_disk(new_model, flush_cache=False)
    num_rows = sidecar.stats()["memory"]["used_rows"]
    assert generate(engine, prompt).num_cached_tokens == 0
    engine.flush_cache()  # waits until nothing is stored any more
    assert sidecar.stats()["memory"]["used_rows"] == num_rows
    (answer,) = store(engine, prompt)
    assert answer.num_cached_tokens == 0
    answer, num_loaded = load(engine, prompt)
    assert num_loaded == HIT
    expected_new.check(prompt, answer)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/update_weights_from_disk", {"model_path": "/missing"}),
        ("/update_weights_from_ipc", {"zmq_handles": {}}),  # needs a package that is not installed
    ],
)
def test_the_cache_is_closed_after_an_update_that_fails(path, body, engine, expected_old):
    """Nothing proves that the weights are still the old ones."""
    prompt = new_prompt()
    store(engine, prompt)
    with pytest.raises(EngineFailed, match="HTTP 400"):
        engine.request("POST", path, body)
    (answer,) = generate_all(engine, [new_prompt()])
    answer, num_loaded = load(engine, prompt)
    assert num_loaded == 0
    expected_old.check(prompt, answer)
    store(engine, later_prompt := new_prompt())
    answer, num_loaded = load(engine, later_prompt)
    assert num_loaded == HIT
    expected_old.check(later_prompt, answer)


@pytest.mark.parametrize("pause", [None, "retract"])
def test_an_update_while_prompts_run_and_are_queued(pause, engine, new_model, expected_new):
    """SGLang changes the weights of requests that run, and refuses to empty its caches.

    It refuses also while it is paused, as trainers of reinforcement learning do, because its storage still
    has work to do for the queued requests.
    """
    prompts = [new_prompt() for _ in range(10)]
    log_before = len(engine.log)
    pending = [engine.start_generate(prompt, 256) for prompt in prompts]
    wait_until(lambda: re.search(r"#queue-req: [1-9]", engine.log[log_before:]))
    if pause:
        engine.request("POST", "/pause_generation", {"mode": pause})
    with pytest.raises(EngineFailed, match="requests are still running or queued"):
        engine.update_weights_from_disk(new_model)
    if pause:
        engine.request("POST", "/continue_generation", {})
    for answer in pending:
        answer.wait()

    def all_hit():  # on a busy machine, SGLang does not store all pages at once
        engine.flush_cache()
        answers = generate_all(engine, prompts)
        for answer, prompt in zip(answers, prompts, strict=True):
            expected_new.check(prompt, answer)
        return all(answer.cached["storage"] == HIT for answer in answers)

    wait_until(all_hit)


def test_an_update_while_no_backend_is_attached(engine, sidecar, new_model, expected_new):
    prompt = new_prompt()
    store(engine, prompt)
    engine.flush_cache()
    engine.detach()
    engine.update_weights_from_disk(new_model)
    engine.attach(lmcache_storage(sidecar.socket_path))
    wait_attached(engine, sidecar)
    (answer,) = store(engine, prompt)
    assert answer.num_cached_tokens == 0
    answer, num_loaded = load(engine, prompt)
    assert num_loaded == HIT
    expected_new.check(prompt, answer)


def test_clearing_the_storage_forgets_the_kv_of_this_engine_only(old, engine, sidecar, expected_old):
    prompt = new_prompt()
    for both in (old, engine):
        store(both, prompt)
    engine.clear_storage()
    answer, num_loaded = load(engine, prompt)
    assert num_loaded == 0
    expected_old.check(prompt, answer)
    assert load(old, prompt)[1] == HIT
    store(engine, later_prompt := new_prompt())
    assert load(engine, later_prompt)[1] == HIT


def test_kv_stays_private_if_the_cache_is_attached_to_a_running_engine(old, sidecar, expected_old, logs):
    prompt, later_prompt = new_prompt(), new_prompt()
    store(old, prompt)
    with serving(logs, enable_hierarchical_cache=True) as engine:
        engine.attach(lmcache_storage(sidecar.socket_path))
        wait_attached(engine, sidecar)
        store(engine, later_prompt)
        assert load(engine, prompt)[1] == 0
        answer, num_loaded = load(engine, later_prompt)
        assert num_loaded == HIT
        expected_old.check(later_prompt, answer)
        assert load(old, later_prompt)[1] == 0
        assert "attached to a running engine" in engine.log
