"""Our tiers under vLLM's own tiering manager, and what goes wrong: misses, and never a wrong byte, a row that
stays held or a job that is reported twice."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.redis]

from vllm.v1.kv_offload.base import LookupResult, ReqContext  # noqa: E402

from lmcache.engines.core import tier_access  # noqa: E402
from lmcache.engines.vllm import tier as tier_module  # noqa: E402
from testing.processes import RedisProcess  # noqa: E402
from tests.harness.offloading_world import KEYS, SHARED, OffloadingWorld, key_of  # noqa: E402
from tests.harness.remote_objects import damage_row  # noqa: E402


@pytest.fixture(scope="module")
def redis():
    with RedisProcess() as server:
        yield server


@pytest.fixture
def disk(tmp_path):
    """Settings of a tier on disk."""
    return {"disk_path": str(tmp_path / "disk"), "disk_size": "64Mi", **SHARED}


@pytest.mark.parametrize("damage", ["flipped", "foreign", "gone"])
def test_a_damaged_object_is_a_miss_once(redis, damage):
    redis.client.flushall()
    settings = {"remote_url": redis.unix_url, **SHARED}
    with OffloadingWorld(**settings) as world:
        world.store(*KEYS)
        world.settle()
    with OffloadingWorld(**settings) as world:
        context = world.request()
        world.wait(lambda: LookupResult.HIT_PENDING in world.look(context, KEYS[:1]))
        # found, and not loaded yet: with the second half of the chain something happens now
        for name in redis.client.scan_iter():
            damage_row(redis.client, name, damage)
        world.settle()
        world.finish(context)
        assert world.load(*KEYS[1:]) == 0
        assert world.store(*KEYS[1:]) == len(KEYS) - 1
        world.settle()
    with OffloadingWorld(**settings) as world:  # invalid objects were written again
        assert world.load(*KEYS[1:]) == len(KEYS) - 1


def test_what_is_evicted_while_it_is_loaded_is_computed(disk, monkeypatch):
    with OffloadingWorld(**disk) as world:
        world.store(*KEYS)
        world.settle()
    with OffloadingWorld(**disk) as world:
        tier = world.tier._tier
        found = tier.find_each

        def find_and_lose(ids):
            answers = found(ids)
            for object_id in ids[2:]:
                tier.remove(object_id)
            return answers

        monkeypatch.setattr(tier, "find_each", find_and_lose)
        assert world.load(*KEYS) == 2


def test_a_full_disk_refuses_and_stays_bounded(disk, tmp_path):
    disk["disk_size"] = "128Ki"
    with OffloadingWorld(num_rows=16, **disk) as world:
        for number in range(40):
            world.store(key_of(("many", number)))
            world.settle()
        tier = world.tier._tier
        assert 0 < tier.used_bytes <= 128 << 10
        assert tier.stats.evicted > 0
        assert world.load(key_of(("many", 39))) == 1


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_redis_that_fails_costs_misses_and_comes_back(fault):
    with RedisProcess() as server:
        settings = {"remote_url": server.unix_url, **SHARED, "remote_timeout_seconds": 3}
        with OffloadingWorld(num_rows=16, **settings) as world:
            world.store(*KEYS)
            world.settle()
        with OffloadingWorld(num_rows=16, **settings) as world:
            assert world.load(*KEYS[:2]) == 2
            getattr(server, fault)()
            assert world.load(*KEYS[2:]) == 0
            world.store(key_of("while it is away"))
            world.settle()
            assert world.tier._tier.health.is_open
            server.start() if fault == "kill" else server.thaw()
            world.wait(lambda: not world.tier._tier.health.is_open)
            world.store(key_of("after"))
            world.settle()
            assert world.tier._tier.stats.stored == 1
        with OffloadingWorld(**settings) as world:
            assert world.load(key_of("after")) == 1


class Hung:
    """A volume that answers nothing, then all at once."""

    def __init__(self, tier, name, monkeypatch):
        self.may_go_on = threading.Event()
        self.num_waiting = 0
        real = getattr(tier, name)

        def hang(*arguments):
            self.num_waiting += 1
            assert self.may_go_on.wait(120)
            return real(*arguments)

        monkeypatch.setattr(tier, name, hang)


@pytest.mark.parametrize("hangs", ["load", "store"])
def test_a_hung_volume_holds_no_row_and_touches_none_later(disk, hangs, monkeypatch):
    """Its job ends, and the row is somebody else's when the volume answers."""
    with OffloadingWorld(**disk) as world:
        world.store(*KEYS)
        world.settle()
    disk["job_seconds"] = 0.5
    with OffloadingWorld(num_rows=4, **disk) as world:
        hung = Hung(world.tier._tier, hangs, monkeypatch)
        if hangs == "load":
            assert world.load(KEYS[0]) == 0
        else:
            world.store(key_of("hung"))
            world.settle()
        assert hung.num_waiting
        assert not world.tier._access.is_available
        assert world.look(world.request(), [KEYS[1]]) == [LookupResult.MISS]  # at once
        world.settle()
        for number in range(4):  # the rows belong to others now
            assert world.store(key_of(("other", number)))
            world.settle()
        hung.may_go_on.set()
        world.wait(lambda: world.tier._access.is_available)
        for number in range(4):
            assert world.load(key_of(("other", number))) == 1
    monkeypatch.undo()
    disk["job_seconds"] = 60
    with OffloadingWorld(**disk) as world:
        assert world.load(*KEYS) == len(KEYS)
        assert world.load(key_of("hung")) == (hangs == "store")  # its bytes were taken in time


def test_lookups_that_hang_are_misses(disk, monkeypatch):
    disk["lookup_seconds"] = 0.1
    with OffloadingWorld(**disk) as world:
        hung = Hung(world.tier._tier, "find_each", monkeypatch)
        assert world.load(*KEYS) == 0
        assert world.look(world.request(), KEYS[:1]) == [LookupResult.MISS]
        hung.may_go_on.set()
        world.wait(lambda: world.tier._access.is_available)


def test_stores_hold_a_quarter_of_the_rows_at_most(disk, monkeypatch):
    with OffloadingWorld(num_rows=8, **disk) as world:
        hung = Hung(world.tier._tier, "store", monkeypatch)
        for key in KEYS:
            assert world.store(key)
        for _ in range(2):  # vLLM polls at a step's first call, and these were made in one step
            world.step()
        assert len(world.manager._jobs) == 2
        hung.may_go_on.set()
        world.settle()
        assert world.tier._tier.stats.stored == 2


def test_shutdown_while_the_volume_hangs_lets_go_of_the_memory(disk, monkeypatch):
    monkeypatch.setattr(tier_module, "_CLOSE_SECONDS", 0.1)
    world = OffloadingWorld(**disk)
    hung = Hung(world.tier._tier, "store", monkeypatch)
    world.store(*KEYS)
    world.close()  # asserts that vLLM could unmap and delete the region
    hung.may_go_on.set()


HOOKS = {
    "find": lambda world: world.load(key_of("unknown")),
    "flush": lambda world: world.load(key_of("unknown")),
    "begin": lambda world: world.store(key_of("unknown")),
    "take_ended": lambda world: (world.step(), world.step()),
    "touch": lambda world: world.manager.touch(KEYS, ReqContext("r")),
    "forget": lambda world: world.finish(world.request()),
    "drain": lambda world: world.reset(0),
    "note_absent": lambda world: world.load(*KEYS),
}


@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_a_fault_of_ours_takes_the_tier_offline_and_every_job_ends(disk, hook, monkeypatch, caplog):
    with OffloadingWorld(**disk) as world:
        world.store(*KEYS)
        world.settle()
    with OffloadingWorld(**disk) as world:
        if hook == "note_absent":
            monkeypatch.setattr(world.tier._tier, "load", lambda *_: None)
        hung = Hung(world.tier._tier, "store", monkeypatch)
        world.store(key_of("under way"))

        faults = iter([ZeroDivisionError(hook)])

        def fail(*_, **__):
            for fault in faults:  # one: ``drain`` is also a part of closing
                raise fault

        monkeypatch.setattr(tier_access.TierAccess, hook, fail)
        monkeypatch.setattr(tier_module, "_CLOSE_SECONDS", 0.1)
        HOOKS[hook](world)
        assert world.tier._is_off
        world.settle()
        assert world.load(*KEYS) in (0, len(KEYS))  # the CPU tier may have them
        world.store(key_of("later"))
        world.settle()
        world.reset(0)
        hung.may_go_on.set()
    assert caplog.text.count("The LMCache tier goes offline, the engine runs on without it") == 1


def test_hits_above_are_marked_as_used_here(disk, monkeypatch):
    with OffloadingWorld(**disk) as world:
        touched = []
        monkeypatch.setattr(world.tier._tier, "touch", lambda keys, *_: touched.extend(keys) or set())
        world.manager.touch(KEYS, ReqContext("r"))
        world.wait(lambda: len(touched) == len(KEYS))
