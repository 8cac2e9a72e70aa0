"""Our tiers under vLLM's own tiering manager: what comes back is what was stored, whatever goes wrong."""

from __future__ import annotations

import dataclasses
import hashlib
import threading

import pytest

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

import vllm  # noqa: E402
from vllm.v1.kv_offload.base import LookupResult, ReqContext  # noqa: E402

from lmcache.engines.core import tier_access  # noqa: E402
from lmcache.engines.vllm import tier as tier_module  # noqa: E402
from lmcache.engines.vllm import tier_settings  # noqa: E402
from testing.child_process import REPOSITORY  # noqa: E402
from testing.processes import RedisProcess  # noqa: E402
from tests.harness.offloading_world import (  # noqa: E402
    PATIENT,
    OffloadingWorld,
    key_of,
    make_config,
)

SHARED = {"weights_fingerprint": "w1", **PATIENT, "remote_timeout_seconds": 30}
KEYS = [key_of(number) for number in range(6)]


@pytest.fixture(scope="module")
def redis():
    with RedisProcess() as server:
        yield server


@pytest.fixture(params=["disk", "redis"])
def settings(request, tmp_path):
    if request.param == "disk":
        return {"disk_path": str(tmp_path / "disk"), "disk_size": "64Mi", **SHARED}
    server = request.getfixturevalue("redis")
    server.client.flushall()
    return {"remote_url": server.unix_url, **SHARED}


@pytest.fixture
def disk(tmp_path):
    return {"disk_path": str(tmp_path / "disk"), "disk_size": "64Mi", **SHARED}


def test_another_engine_finds_what_was_stored(settings):
    with OffloadingWorld(**settings) as world:
        assert world.store(*KEYS) == len(KEYS)
        world.settle()
    with OffloadingWorld(**settings) as world:
        assert world.load(*KEYS) == len(KEYS)
        assert world.tier._tier.stats.hits == len(KEYS)
        assert world.load(*KEYS, key_of("absent")) == len(KEYS)
        assert world.load(key_of("absent")) == 0


def test_more_chunks_than_the_cpu_tier_has_rows(settings):
    with OffloadingWorld(num_rows=4, **settings) as world:
        for key in KEYS:
            assert world.store(key)
            world.settle()
        world.forget_primary()
        for key in KEYS:
            assert world.load(key) == 1
            world.settle()


def test_a_chain_may_have_holes_and_several_groups(disk):
    grouped = [key_of(0, group) for group in range(3)]
    with OffloadingWorld(**disk) as world:
        world.store(KEYS[0], grouped[1], KEYS[3])
        world.settle()
    with OffloadingWorld(**disk) as world:
        assert world.load(*KEYS) == 1
        assert world.load(KEYS[3]) == 1
        assert [world.load(key) for key in grouped] == [1, 1, 0]


# ---- whose chunks they are ----


def test_what_is_not_named_alike_is_not_shared(disk):
    with OffloadingWorld(**disk) as world:
        world.store(*KEYS)
        world.settle()
    for others in ({"weights_fingerprint": "w2"}, {}):
        config = make_config() if others else make_config(dtype="bfloat16")
        with OffloadingWorld(config=config, **{**disk, **others}) as world:
            assert world.load(*KEYS) == 0


def test_without_a_fingerprint_chunks_are_private(disk, caplog):
    del disk["weights_fingerprint"]
    with OffloadingWorld(num_rows=4, **disk) as world:
        world.store(KEYS[0])
        world.forget_primary()
        assert world.load(KEYS[0]) == 1
    assert "stay private to this engine: to share them set weights_path" in caplog.text
    with OffloadingWorld(**disk) as world:
        assert world.load(KEYS[0]) == 0


def make_model(folder, weights=b"weights", config=b"{}"):
    """Files that are older than this process, as an engine's are: their names say their hashes."""
    (folder / "blobs").mkdir(parents=True)
    blob = folder / "blobs" / hashlib.sha256(weights).hexdigest()
    blob.write_bytes(weights)
    (folder / "model.safetensors").symlink_to(blob)
    (folder / "config.json").write_bytes(config)
    return {"weights_path": str(folder)}


def test_weights_are_named_by_their_content(disk, tmp_path):
    del disk["weights_fingerprint"]
    with OffloadingWorld(**disk, **make_model(tmp_path / "a")) as world:
        world.store(*KEYS)
        world.settle()
    for name, content, num_found in (
        ("same", {}, len(KEYS)),
        ("tuned", {"weights": b"others"}, 0),
        ("scaled", {"config": b'{"rope_scaling": 2}'}, 0),
    ):
        with OffloadingWorld(**disk, **make_model(tmp_path / name, **content)) as world:
            assert world.load(*KEYS) == num_found, name


def test_until_the_weights_have_a_name_nothing_is_stored_or_found(disk, monkeypatch, tmp_path):
    named = threading.Event()
    monkeypatch.setattr(tier_settings.TierSettings, "weights", lambda self: named.wait(60) and "w1")
    monkeypatch.setattr(tier_module, "_START_SECONDS", 0)
    with OffloadingWorld(**disk, waits_for_weights=False) as world:
        world.store(KEYS[0])
        world.settle()
        assert world.tier._tier.stats.stored == 0
        assert world.look(world.request(), [KEYS[1]]) == [LookupResult.MISS]
        named.set()
        world.wait(lambda: world.tier._weights.done())
        world.store(KEYS[1])
        world.settle()
        assert world.tier._tier.stats.stored == 1


def test_the_first_request_finds_what_there_is(disk):
    with OffloadingWorld(**disk) as world:
        world.store(KEYS[0])
        world.settle()
    with OffloadingWorld(**disk) as world:  # no step before
        assert world.manager.lookup(KEYS[0], world.request()) is LookupResult.RETRY


def test_a_reset_leaves_nothing_of_the_old_weights(disk):
    with OffloadingWorld(num_rows=4, **disk) as world:
        world.store(KEYS[0])
        world.reset("others")
        assert world.load(KEYS[0]) == 0
        world.store(KEYS[0])
        world.forget_primary()
        assert world.load(KEYS[0]) == 1
    with OffloadingWorld(**disk) as world:
        assert world.load(KEYS[0]) == 1  # of the old weights, which this engine has


def test_hashes_that_can_be_made_to_collide_are_not_taken(disk):
    short = b"xxhash: 16 bytes" + bytes(4)
    with OffloadingWorld(**disk) as world:
        world.store(short)
        world.settle()
        assert world.tier._tier.stats.stored == 0
    with OffloadingWorld(**disk) as world:
        assert world.load(short) == 0


# ---- settings ----


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"disk_pth": "/x"}, "unknown setting disk_pth"),
        ({"disk_size": "10 apples"}, "disk_size: "),
        ({"remote_url": "redis://h"}, "set disk_path or remote_url"),
        ({"disk_path": None}, "set disk_path or remote_url"),
        ({"disk_path": "/proc/none"}, "/proc/none"),
        ({"job_seconds": "soon"}, "job_seconds: 'soon' is not a number of seconds"),
        ({"disk_path": None, "remote_url": "mysql://user:secret@h"}, "remote_url: "),
    ],
)
def test_a_wrong_setting_leaves_an_engine_that_runs(disk, wrong, said, caplog):
    with OffloadingWorld(**{**disk, **wrong}) as world:
        assert world.store(*KEYS) == len(KEYS)
        assert world.load(*KEYS) == len(KEYS)  # of the CPU tier
        assert world.load(key_of("absent")) == 0
        world.settle()
        world.reset(0)
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("lmcache")]
    assert line.startswith("The LMCache tier is off, the engine runs without it: ")
    assert said in line
    assert "secret" not in line


def test_a_version_that_nobody_tried_leaves_an_engine_that_runs(disk, caplog, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    with OffloadingWorld(**disk) as world:
        assert world.load(KEYS[0]) == 0
    assert "vLLM 0.99.0 is not supported" in caplog.text


def test_replicas_have_a_directory_each(disk):
    parallel = make_config().parallel
    worlds = []
    for index in range(2):
        replica = dataclasses.replace(parallel, data_parallel_index=index, data_parallel_size=2)
        worlds.append(OffloadingWorld(config=dataclasses.replace(make_config(), parallel=replica), **disk))
    assert not any(world.tier._is_off for world in worlds)
    for world in worlds:
        world.close()


def test_credentials_are_read_from_files(tmp_path):
    with RedisProcess(password="right") as server:
        (tmp_path / "password").write_text("wrong\n")
        url = server.unix_url.replace(":right@", "")
        files = {"remote_url": url, "remote_password_file": str(tmp_path / "password")}
        with OffloadingWorld(**SHARED, **files) as world:
            world.store(KEYS[0])
            world.settle()
            assert world.tier._tier.stats.stored == 0
            (tmp_path / "password").write_text("right\n")
            world.wait(lambda: not world.tier._tier.health.is_open)
            world.store(KEYS[1])
            world.settle()
            assert world.tier._tier.stats.stored == 1


# ---- faults ----


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
            value = bytearray(redis.client.get(name))
            value[-1] ^= 1
            if damage == "gone":
                redis.client.delete(name)
            else:
                redis.client.set(name, bytes(value) if damage == "flipped" else b"somebody else's")
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

        def fail(*_, **__):
            raise ZeroDivisionError(hook)

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


def test_every_method_of_the_interface_is_there():
    base = tier_module.SecondaryTierManager
    assert not tier_module.LMCacheTier.__abstractmethods__
    for name in ("lookup", "submit_store", "submit_load", "get_finished_jobs", "drain_jobs", "shutdown"):
        assert getattr(tier_module.LMCacheTier, name) is not getattr(base, name)


def test_the_guide_has_every_setting():
    guide = (REPOSITORY / "docs" / "guides" / "offloading.md").read_text()
    for name, default in tier_settings.TierSettings._field_defaults.items():
        assert f"`{name}`" in guide
        if isinstance(default, float):
            (row,) = [line for line in guide.splitlines() if line.startswith(f"| `{name}`")]
            assert row.endswith(f"| {default:g} |")
