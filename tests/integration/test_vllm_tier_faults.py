"""Faults of this project's tiers under vLLM's own tiering manager. A fault causes misses, but never a wrong
byte, a row that stays held, or a job that is reported twice."""

import threading

import pytest

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.redis]

from vllm.v1.kv_offload.base import LookupResult, ReqContext  # noqa: E402

from lmcache.common.timing import TIMING  # noqa: E402
from lmcache.engines.core import tier_access  # noqa: E402
from testing.deadlines import CALLS  # noqa: E402
from testing.processes import RedisProcess  # noqa: E402
from tests.harness.offloading_world import KEYS, SHARED, OffloadingWorld, key_of  # noqa: E402
from tests.harness.remote_objects import damage_row  # noqa: E402

DEADLINES = CALLS


@pytest.fixture(scope="module")
def redis():
    with RedisProcess() as server:
        yield server


@pytest.fixture
def disk(tmp_path):
    """Settings of a disk tier."""
    return {"disk_path": str(tmp_path / "disk"), "disk_size": "64Mi", **SHARED}


@pytest.mark.parametrize("damage", ["flipped", "foreign", "gone"])
def test_damaged_object_is_a_miss_until_stored_again(redis, damage):
    redis.client.flushall()
    settings = {"remote_url": redis.unix_url, **SHARED}
    with OffloadingWorld(**settings) as world:
        world.store(*KEYS)
        world.settle()
    with OffloadingWorld(**settings) as world:
        context = world.request()
        world.wait(lambda: LookupResult.HIT_PENDING in world.look(context, KEYS[:1]))
        # The chunks are found but not loaded yet. Now the second half of the chain is damaged.
        for name in redis.client.scan_iter():
            damage_row(redis.client, name, damage)
        world.settle()
        world.finish(context)
        assert world.load(*KEYS[1:]) == 0
        assert world.store(*KEYS[1:]) == len(KEYS) - 1
        world.settle()
    with OffloadingWorld(**settings) as world:  # invalid objects were replaced
        assert world.load(*KEYS[1:]) == len(KEYS) - 1


def test_chunks_evicted_during_a_load_are_misses(disk, monkeypatch):
    with OffloadingWorld(**disk) as world:
        world.store(*KEYS)
        world.settle()
    with OffloadingWorld(**disk) as world:
        tier = world.tier._tier
        find_each = tier.find_each

        def find_and_evict(ids):
            answers = find_each(ids)
            for object_id in ids[2:]:
                tier.remove(object_id)
            return answers

        monkeypatch.setattr(tier, "find_each", find_and_evict)
        assert world.load(*KEYS) == 2


def test_full_disk_stays_within_its_size(disk, tmp_path):
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
def test_failing_redis_causes_misses_until_it_recovers(fault):
    with RedisProcess() as server:
        settings = {"remote_url": server.unix_url, **SHARED, "remote_timeout_seconds": 3}
        with OffloadingWorld(num_rows=16, **settings) as world:
            world.store(*KEYS)
            world.settle()
        with OffloadingWorld(num_rows=16, **settings) as world:
            assert world.load(*KEYS[:2]) == 2
            getattr(server, fault)()
            assert world.load(*KEYS[2:]) == 0
            world.store(key_of("during the outage"))
            world.settle()
            assert world.tier._tier.health.is_open
            server.start() if fault == "kill" else server.thaw()
            world.wait(lambda: not world.tier._tier.health.is_open)
            world.store(key_of("after"))
            world.settle()
            assert world.tier._tier.stats.stored == 1
        with OffloadingWorld(**settings) as world:
            assert world.load(key_of("after")) == 1


class Hang:
    """A method of a volume that hangs until ``may_continue`` is set."""

    def __init__(self, tier, name, monkeypatch):
        self.may_continue = threading.Event()
        self.num_waiting = 0
        method = getattr(tier, name)

        def hang(*arguments):
            self.num_waiting += 1
            assert self.may_continue.wait(120)
            return method(*arguments)

        monkeypatch.setattr(tier, name, hang)


@pytest.mark.parametrize("method", ["load", "store"])
def test_hanging_volume_holds_no_row_and_changes_none_later(disk, method, monkeypatch):
    """The job ends, and its row belongs to another chunk when the volume answers."""
    with OffloadingWorld(**disk) as world:
        world.store(*KEYS)
        world.settle()
    disk["job_seconds"] = 0.5
    with OffloadingWorld(num_rows=4, **disk) as world:
        hang = Hang(world.tier._tier, method, monkeypatch)
        if method == "load":
            assert world.load(KEYS[0]) == 0
        else:
            world.store(key_of("hung"))
            world.settle()
        assert hang.num_waiting
        assert not world.tier._access.is_available
        assert world.look(world.request(), [KEYS[1]]) == [LookupResult.MISS]  # at once
        world.settle()
        for number in range(4):  # the rows are reused now
            assert world.store(key_of(("other", number)))
            world.settle()
        hang.may_continue.set()
        world.wait(lambda: world.tier._access.is_available)
        for number in range(4):
            assert world.load(key_of(("other", number))) == 1
    monkeypatch.undo()
    disk["job_seconds"] = 60
    with OffloadingWorld(**disk) as world:
        assert world.load(*KEYS) == len(KEYS)
        assert world.load(key_of("hung")) == (method == "store")  # its bytes were copied in time


def test_hanging_lookups_are_misses(disk, monkeypatch):
    disk["lookup_seconds"] = 0.1
    with OffloadingWorld(**disk) as world:
        hang = Hang(world.tier._tier, "find_each", monkeypatch)
        assert world.load(*KEYS) == 0
        assert world.look(world.request(), KEYS[:1]) == [LookupResult.MISS]
        hang.may_continue.set()
        world.wait(lambda: world.tier._access.is_available)


def test_stores_hold_at_most_a_quarter_of_the_rows(disk, monkeypatch):
    with OffloadingWorld(num_rows=8, **disk) as world:
        hang = Hang(world.tier._tier, "store", monkeypatch)
        for key in KEYS:
            assert world.store(key)
        for _ in range(2):  # vLLM polls at the first call of a step, and all stores were made in one step
            world.step()
        assert len(world.manager._jobs) == 2
        hang.may_continue.set()
        world.settle()
        assert world.tier._tier.stats.stored == 2


def test_shutdown_releases_the_memory_while_the_volume_hangs(disk, monkeypatch):
    monkeypatch.setattr(TIMING, "close_seconds", 0.1)
    world = OffloadingWorld(**disk)
    hang = Hang(world.tier._tier, "store", monkeypatch)
    world.store(*KEYS)
    world.close()  # asserts that vLLM can unmap and delete the region
    hang.may_continue.set()


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
def test_internal_error_takes_the_tier_offline_and_every_job_ends(disk, hook, monkeypatch, caplog):
    with OffloadingWorld(**disk) as world:
        world.store(*KEYS)
        world.settle()
    with OffloadingWorld(**disk) as world:
        if hook == "note_absent":
            monkeypatch.setattr(world.tier._tier, "load", lambda *_: None)
        hang = Hang(world.tier._tier, "store", monkeypatch)
        world.store(key_of("in progress"))

        faults = iter([ZeroDivisionError(hook)])

        def fail(*_, **__):
            for fault in faults:  # only the first call fails: closing also calls ``drain``
                raise fault

        monkeypatch.setattr(tier_access.TierAccess, hook, fail)
        monkeypatch.setattr(TIMING, "close_seconds", 0.1)
        HOOKS[hook](world)
        assert world.tier._is_off
        world.settle()
        assert world.load(*KEYS) in (0, len(KEYS))  # the CPU tier may have the chunks
        world.store(key_of("later"))
        world.settle()
        world.reset(0)
        hang.may_continue.set()
    assert caplog.text.count("The LMCache tier goes offline, the engine runs on without it") == 1


def test_hits_in_the_cpu_tier_mark_chunks_as_used(disk, monkeypatch):
    with OffloadingWorld(**disk) as world:
        touched = []
        monkeypatch.setattr(world.tier._tier, "touch", lambda keys, *_: touched.extend(keys) or set())
        world.manager.touch(KEYS, ReqContext("r"))
        world.wait(lambda: len(touched) == len(KEYS))
