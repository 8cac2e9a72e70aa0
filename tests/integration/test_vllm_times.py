"""Times and failed loads of requests, as a sidecar knows them of engines under vLLM's scheduler."""

import json
import urllib.parse

import pytest
import vllm

from lmcache_client.core.transfers import LoadTransfer
from testing.processes import RedisProcess, SidecarProcess
from tests.harness.sim.config import CHUNK, SimGroup, SimSettings
from tests.harness.sim.world import make_tokens, only_engine, world

__all__ = ["world"]

pytestmark = pytest.mark.vllm

SETTINGS = SimSettings(num_blocks=256)
ENGINES = {
    "first runner": SETTINGS,
    "second runner": SimSettings(num_blocks=256, runner=2),
    "asynchronous": SimSettings(num_blocks=256, is_async=True, runner=2),
    "drafts": SimSettings(num_blocks=256, num_drafts=2),
    "two ranks": SimSettings(num_blocks=256, tensor_parallel=2, num_kv_heads=2),
    "two stages": SimSettings(num_blocks=256, pipeline_parallel=2),
}
if not vllm.__version__.startswith("0.29."):  # it can't restart a request whose load failed
    ENGINES["windows"] = SimSettings(num_blocks=256, groups=(SimGroup(), SimGroup("window", 50)))


def explained(sidecar: SidecarProcess, name: str) -> dict:
    """The request on the page ``/requests``, once the engine has reported its times."""

    def ended(_: object) -> dict | None:
        page = json.loads(sidecar.get(f"/requests?id={urllib.parse.quote(name)}"))
        named = [request for request in page["requests"] if request["request_id"] == name]
        return named[0] if named and named[0]["lookup_seconds"] is not None else None

    return sidecar.wait_until(ended)


@pytest.mark.parametrize("settings", ENGINES.values(), ids=ENGINES)
def test_each_request_is_timed_to_its_first_token(settings):
    prompt = make_tokens(4 * CHUNK + 7)
    with only_engine(settings) as (sidecar, engine):
        computed = explained(sidecar, engine.serve(prompt))
        # On a busy machine, the engine can need blocks of a window before they are copied.
        repeated = (explained(sidecar, engine.serve(prompt)) for _ in range(20))
        loaded = next(request for request in repeated if "not_stored" not in request["tokens"])
    assert computed["tokens"] == {"new": 4 * CHUNK, "tail": 7}
    assert computed["load_seconds"] == {}
    assert loaded["tokens"] == {"memory": 4 * CHUNK, "tail": 7}
    assert 0 < loaded["load_seconds"]["memory"] < loaded["first_token_seconds"]
    assert computed["first_token_seconds"] > 0
    assert computed["wait_seconds"] == loaded["wait_seconds"] == 0.0


@pytest.mark.redis
def test_a_request_waits_for_a_redis_that_freezes():
    prompt = make_tokens(4 * CHUNK + 1)
    with RedisProcess() as redis:
        for is_stored in (False, True):
            options = {"remote_url": redis.unix_url, "remote_timeout_seconds": 1}
            with only_engine(SETTINGS, **options) as (sidecar, engine):
                if is_stored:
                    redis.freeze()
                request = explained(sidecar, engine.serve(prompt))
                redis.thaw()
                sidecar.wait_until(lambda stats: not stats["num_unwritten_rows"])
                metrics, stats = sidecar.get("/metrics"), sidecar.stats()
    assert request["tokens"] == {"new": 4 * CHUNK, "tail": 1}, "this sidecar could not ask Redis"
    assert 0.15 < request["wait_seconds"] < request["first_token_seconds"]
    assert stats["benefit"]["wait_seconds"] > request["wait_seconds"] - 1e-5
    assert "lmcache_request_wait_seconds_count" in metrics


def fail_from(monkeypatch, number: int) -> None:
    """Let the copies of a load fail from this piece on."""
    copy = LoadTransfer._copy

    def copy_or_fail(self, session, copier, numbers) -> None:
        copy(self, session, copier, numbers[: max(0, number - numbers.start)])

    monkeypatch.setattr(LoadTransfer, "_copy", copy_or_fail)


@pytest.mark.parametrize(("num_good", "num_loaded"), [(0, 0), (2, 2), (4, 4)])
def test_a_failed_load_is_the_cause_of_the_tokens_that_it_did_not_load(
    world, monkeypatch, num_good, num_loaded
):
    prompt = make_tokens(4 * CHUNK + 7)
    with world.engines(SETTINGS) as (engine,):
        engine.serve(prompt)
        before = world.sidecar.stats()["causes"]["cause_tokens"].get("load_failed", 0)
        with monkeypatch.context() as patch:
            fail_from(patch, num_good)
            name = engine.serve(prompt)
        request = explained(world.sidecar, name)
        again = explained(world.sidecar, engine.serve(prompt))
        causes = world.sidecar.stats()["causes"]
    expected = {"memory": num_loaded * CHUNK, "load_failed": (4 - num_loaded) * CHUNK, "tail": 7}
    assert request["tokens"] == {cause: number for cause, number in expected.items() if number}
    assert again["tokens"] == {"memory": 4 * CHUNK, "tail": 7}
    assert causes["cause_tokens"].get("load_failed", 0) - before == (4 - num_loaded) * CHUNK
