"""Real sidecars whose disk and remote tiers are encrypted, with keys that change while they run."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.processes import RedisProcess, SidecarProcess
from tests.harness.engine import check_promoted, payload, restart_without_memory, session_of, store
from tests.harness.sidecar.wire import make_keys
from tests.harness.tiers.encryption import key_of, write_keys

pytestmark = pytest.mark.redis


def wait_for_versions(sidecar: SidecarProcess, tier: str, *versions: int) -> None:
    expected = {"write_version": versions[-1], "versions": list(versions)}
    sidecar.wait_until(lambda stats: stats[tier]["encryption"] == expected)


def media(server: RedisProcess, disk: Path) -> bytes:
    """All bytes of the disk tier, and of a dump of all keys of Redis."""
    with server.client as client:
        dumps = [client.dump(name) for name in client.scan_iter()]
    return b"".join([*dumps, *(file.read_bytes() for file in disk.rglob("*") if file.is_file())])


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    write_keys(tmp_path / "keys", 1)
    return tmp_path / "keys"


@contextlib.contextmanager
def encrypted(server: RedisProcess, tmp_path: Path, **options: object) -> Iterator[SidecarProcess]:
    """A sidecar with both tiers, whose keys are in the same directory."""
    directories = {
        "disk_encryption_keys_dir": tmp_path / "keys",
        "remote_encryption_keys_dir": tmp_path / "keys",
    }
    tiers = {"remote_url": server.unix_url, "disk_path": tmp_path / "tier", "disk_size": "64Mi"}
    with SidecarProcess(**(tiers | directories | options)) as sidecar:
        yield sidecar


def test_rows_are_encrypted_in_both_tiers_and_survive_restarts(empty_redis, tmp_path, keys):
    with encrypted(empty_redis, tmp_path) as sidecar:
        with session_of(sidecar) as session:
            store(session, *range(10))
            sidecar.settled()
            stored = media(empty_redis, tmp_path / "tier")
            assert len(stored) > 20 * 100_000
            # Payloads are random bytes, which Redis cannot compress in a dump.
            assert not any(bytes(payload(number)[:64]) in stored for number in range(10))
        restart_without_memory(sidecar)
        with session_of(sidecar) as session:
            check_promoted(session, *range(10))
            assert sidecar.stats()["disk"]["hits"] == 10
        sidecar.options["disk_path"] = tmp_path / "empty"
        restart_without_memory(sidecar)
        with session_of(sidecar) as session:
            check_promoted(session, *range(10))
            assert sidecar.stats()["remote"]["hits"] == 10
            text = f"{sidecar.get('/stats')}{sidecar.get('/metrics')}{sidecar.log}"
            assert key_of(1).hex() not in text
            assert 'lmcache_tier_key_absent_total{tier="disk"} 0.0' in text


@pytest.mark.parametrize("tier", ["disk", "remote"])
def test_keys_rotate_while_the_sidecar_runs(empty_redis, tmp_path, keys, tier):
    medium = (
        {"disk_path": tmp_path / "tier", "disk_encryption_keys_dir": keys}
        if tier == "disk"
        else {"remote_url": empty_redis.unix_url, "remote_encryption_keys_dir": keys}
        | {"remote_encryption_delay_seconds": 0}
    )
    with SidecarProcess(**medium) as sidecar:
        wait_for_versions(sidecar, tier, 1)
        with session_of(sidecar) as session:
            store(session, 1, 2)
            sidecar.settled()
            write_keys(keys, 1, 2)
            wait_for_versions(sidecar, tier, 1, 2)
            store(session, 3)
            sidecar.settled()
        restart_without_memory(sidecar)
        with session_of(sidecar) as session:
            check_promoted(session, 1, 2, 3)
            assert (sidecar.stats()[tier]["hits"], sidecar.stats()[tier]["key_absent"]) == (3, 0)
        write_keys(keys, 2)
        restart_without_memory(sidecar)
        with session_of(sidecar) as session:
            check_promoted(session, 3)
            session.lookup("old", [(0, make_keys(1))])
            sidecar.wait_until(lambda stats: stats[tier]["key_absent"])
            assert session.lookup("old", [(0, make_keys(1))]).num_leased == 0
            stats = sidecar.stats()[tier]
            assert (stats["invalid"], stats["is_reachable"]) == ({}, True)
            write_keys(keys, 1, 2)  # the rows of version 1 are still there
            wait_for_versions(sidecar, tier, 1, 2)
            check_promoted(session, 2)


@pytest.mark.parametrize("stay_up", ["false", "true"])
def test_without_a_key_nothing_is_written_until_there_is_one(empty_redis, tmp_path, stay_up):
    with encrypted(empty_redis, tmp_path, stay_up=stay_up) as sidecar, session_of(sidecar) as session:
        assert sidecar.get("/readyz") == "ready\n"
        store(session, 1)
        assert session.lookup("r", [(0, make_keys(1))]).num_leased == 1
        sidecar.wait_until(lambda stats: not stats["remote"]["is_reachable"])
        stats = sidecar.stats()
        for tier in ("disk", "remote"):
            assert not stats[tier]["is_reachable"]
            assert f"{tmp_path / 'keys'} can't be read: no such file" in stats[tier]["off_reason"]
            assert f"--{tier}-encryption-keys-dir: {tmp_path / 'keys'} can't be read" in sidecar.log
        assert media(empty_redis, tmp_path / "tier") == b""
        write_keys(tmp_path / "keys", 1)
        sidecar.wait_until(lambda stats: stats["disk"]["written"] == stats["remote"]["written"] == 1)
        stored = media(empty_redis, tmp_path / "tier")
        assert len(stored) > 200_000
        assert bytes(payload(1)[:64]) not in stored
