"""This project's tiers under vLLM's own tiering manager: loaded bytes equal stored bytes."""

import dataclasses
import hashlib
import threading
from dataclasses import fields

import pytest

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.redis]

import vllm  # noqa: E402
from vllm.v1.kv_offload.base import LookupResult  # noqa: E402

from lmcache.common.timing import TIMING  # noqa: E402
from lmcache.engines.vllm import tier as tier_module  # noqa: E402
from lmcache.engines.vllm import tier_settings  # noqa: E402
from testing.child_process import REPOSITORY  # noqa: E402
from testing.deadlines import CALLS  # noqa: E402
from testing.processes import RedisProcess  # noqa: E402
from tests.harness.offloading_world import KEYS, SHARED, OffloadingWorld, key_of, make_config  # noqa: E402

DEADLINES = CALLS


@pytest.fixture(scope="module")
def redis():
    with RedisProcess() as server:
        yield server


@pytest.fixture
def disk(tmp_path):
    """Settings of a disk tier."""
    return {"disk_path": str(tmp_path / "disk"), "disk_size": "64Mi", **SHARED}


@pytest.fixture(params=["disk", "redis"])
def settings(request, tmp_path):
    if request.param == "disk":
        return {"disk_path": str(tmp_path / "disk"), "disk_size": "64Mi", **SHARED}
    server = request.getfixturevalue("redis")
    server.client.flushall()
    return {"remote_url": server.unix_url, **SHARED}


def test_another_engine_loads_stored_chunks(settings):
    with OffloadingWorld(**settings) as world:
        assert world.store(*KEYS) == len(KEYS)
        world.settle()
    with OffloadingWorld(**settings) as world:
        assert world.load(*KEYS) == len(KEYS)
        assert world.tier._tier.stats.hits == len(KEYS)
        assert world.load(*KEYS, key_of("absent")) == len(KEYS)
        assert world.load(key_of("absent")) == 0


def test_tier_holds_more_chunks_than_the_cpu_tier(settings):
    with OffloadingWorld(num_rows=4, **settings) as world:
        for key in KEYS:
            assert world.store(key)
            world.settle()
        world.forget_primary()
        for key in KEYS:
            assert world.load(key) == 1
            world.settle()


def test_chains_may_have_holes_and_several_groups(disk):
    grouped = [key_of(0, group) for group in range(3)]
    with OffloadingWorld(**disk) as world:
        world.store(KEYS[0], grouped[1], KEYS[3])
        world.settle()
    with OffloadingWorld(**disk) as world:
        assert world.load(*KEYS) == 1
        assert world.load(KEYS[3]) == 1
        assert [world.load(key) for key in grouped] == [1, 1, 0]


# ---- shared and private chunks ----


def test_different_weights_or_configurations_share_nothing(disk):
    with OffloadingWorld(**disk) as world:
        world.store(*KEYS)
        world.settle()
    for other_settings in ({"weights_fingerprint": "w2"}, {}):
        config = make_config() if other_settings else make_config(dtype="bfloat16")
        with OffloadingWorld(config=config, **{**disk, **other_settings}) as world:
            assert world.load(*KEYS) == 0


def test_chunks_are_private_without_a_fingerprint(disk, caplog):
    del disk["weights_fingerprint"]
    with OffloadingWorld(num_rows=4, **disk) as world:
        world.store(KEYS[0])
        world.forget_primary()
        assert world.load(KEYS[0]) == 1
    assert "stay private to this engine: to share them set weights_path" in caplog.text
    with OffloadingWorld(**disk) as world:
        assert world.load(KEYS[0]) == 0


def make_model(folder, weights=b"weights", config=b"{}"):
    """Files older than this process, as for an engine. The name of a blob is its hash, as on Hugging Face."""
    (folder / "blobs").mkdir(parents=True)
    blob = folder / "blobs" / hashlib.sha256(weights).hexdigest()
    blob.write_bytes(weights)
    (folder / "model.safetensors").symlink_to(blob)
    (folder / "config.json").write_bytes(config)
    return {"weights_path": str(folder)}


def test_fingerprint_is_derived_from_the_weight_files(disk, tmp_path):
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


def test_nothing_is_stored_or_found_before_the_fingerprint_is_known(disk, monkeypatch, tmp_path):
    is_known = threading.Event()
    monkeypatch.setattr(tier_settings.TierSettings, "weights", lambda self: is_known.wait(60) and "w1")
    monkeypatch.setattr(TIMING, "start_seconds", 0)
    with OffloadingWorld(**disk, waits_for_weights=False) as world:
        world.store(KEYS[0])
        world.settle()
        assert world.tier._tier.stats.stored == 0
        assert world.look(world.request(), [KEYS[1]]) == [LookupResult.MISS]
        is_known.set()
        world.wait(lambda: world.tier._weights.done())
        world.store(KEYS[1])
        world.settle()
        assert world.tier._tier.stats.stored == 1


def test_first_request_finds_stored_chunks(disk):
    with OffloadingWorld(**disk) as world:
        world.store(KEYS[0])
        world.settle()
    with OffloadingWorld(**disk) as world:  # no engine step before the lookup
        assert world.manager.lookup(KEYS[0], world.request()) is LookupResult.RETRY


def test_reset_hides_chunks_of_the_old_weights(disk):
    with OffloadingWorld(num_rows=4, **disk) as world:
        world.store(KEYS[0])
        world.reset("others")
        assert world.load(KEYS[0]) == 0
        world.store(KEYS[0])
        world.forget_primary()
        assert world.load(KEYS[0]) == 1
    with OffloadingWorld(**disk) as world:
        assert world.load(KEYS[0]) == 1  # KV of the old weights, which this engine has


def test_keys_of_weak_hashes_are_not_stored(disk):
    short = b"xxhash: 16 bytes" + bytes(4)
    with OffloadingWorld(**disk) as world:
        world.store(short)
        world.settle()
        assert world.tier._tier.stats.stored == 0
    with OffloadingWorld(**disk) as world:
        assert world.load(short) == 0


# ---- settings ----


@pytest.mark.parametrize(
    ("wrong", "message"),
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
def test_engine_runs_without_the_tier_if_a_setting_is_invalid(disk, wrong, message, caplog):
    with OffloadingWorld(**{**disk, **wrong}) as world:
        assert world.store(*KEYS) == len(KEYS)
        assert world.load(*KEYS) == len(KEYS)  # from the CPU tier
        assert world.load(key_of("absent")) == 0
        world.settle()
        world.reset(0)
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("lmcache")]
    assert line.startswith("The LMCache tier is off, the engine runs without it: ")
    assert message in line
    assert "secret" not in line


def test_engine_of_an_unsupported_version_runs_without_the_tier(disk, caplog, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    with OffloadingWorld(**disk) as world:
        assert world.load(KEYS[0]) == 0
    assert "vLLM 0.99.0 is not supported" in caplog.text


def test_data_parallel_replicas_have_separate_directories(disk):
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


def test_tier_implements_every_method_of_the_interface():
    base = tier_module.SecondaryTierManager
    assert not tier_module.LMCacheTier.__abstractmethods__
    for name in ("lookup", "submit_store", "submit_load", "get_finished_jobs", "drain_jobs", "shutdown"):
        assert getattr(tier_module.LMCacheTier, name) is not getattr(base, name)


def test_guide_lists_every_setting_with_its_default():
    guide = (REPOSITORY / "docs" / "guides" / "offloading.md").read_text()
    for setting in fields(tier_settings.TierSettings):
        name, default = setting.name, setting.default
        assert f"`{name}`" in guide
        if isinstance(default, float):
            (row,) = [line for line in guide.splitlines() if line.startswith(f"| `{name}`")]
            assert row.endswith(f"| {default:g} |")
