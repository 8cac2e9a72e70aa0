"""A real sidecar with a disk: rows found after SIGTERM and SIGKILL, and a disk that fails."""

import pytest

from lmcache_client.rpc.service import RESERVE
from testing.child_process import wait_until
from testing.processes import RedisProcess, SidecarProcess
from tests.harness.engine import (
    check_promoted,
    load,
    mapped_slots,
    payload,
    restart_without_memory,
    session_of,
    store,
)
from tests.harness.sidecar.wire import RawClient, make_keys, slots_of


@pytest.mark.redis
def test_rows_committed_before_sigterm_are_in_both_lower_tiers(tmp_path):
    with (
        RedisProcess() as redis,
        SidecarProcess(remote_url=redis.unix_url, disk_path=tmp_path / "1") as sidecar,
    ):
        with session_of(sidecar) as session:
            store(session, *range(20))
            assert sidecar.terminate() == 0
        assert redis.client.dbsize() == 20
        assert len(list(tmp_path.rglob("*.0"))) == 20
        restart_without_memory(sidecar)
        with session_of(sidecar) as session:
            check_promoted(session, *range(20))
            disk = sidecar.stats()["disk"]
            assert (disk["promoted"], disk["hits"]) == (20, 20)
            assert disk["used_bytes"] > 20 * 100_000
            assert disk["load_bytes_per_second"] > 0
        sidecar.options["disk_path"] = tmp_path / "2"
        restart_without_memory(sidecar)
        with session_of(sidecar) as session:
            check_promoted(session, *range(20))
            assert sidecar.terminate() == 0  # rows promoted from Redis are written to the new disk
        assert len(list((tmp_path / "2").rglob("*.0"))) == 20


def test_rows_found_after_sigkill_are_intact(tmp_path):
    with SidecarProcess(disk_path=tmp_path, disk_size="64Mi") as sidecar:
        with session_of(sidecar) as session:
            store(session, *range(10))
            sidecar.wait_until(lambda stats: stats["disk"]["written"] == 10)
            store(session, *range(10, 60))
            sidecar.kill()
        restart_without_memory(sidecar)
        with session_of(sidecar) as session:
            check_promoted(session, *range(10))
            session.lookup("more", [(0, make_keys(*range(10, 60)))])
            sidecar.settled()
            wait_until(lambda: not session.lookup("more", [(0, make_keys(*range(10, 60)))]).is_probing)
            slots = slots_of(session, make_keys(*range(10, 60)))
            for slot, number in zip(slots, range(10, 60), strict=False):
                assert (mapped_slots(session)[slot.row, :100_000] == payload(number)).all()


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [("file", "1Mi", "can't hold a disk tier"), ("", "900Ti", "are more than 90% of the volume")],
)
def test_unusable_disk_is_off_while_the_sidecar_serves(tmp_path, name, size, reason):
    (tmp_path / "file").touch()
    with SidecarProcess(disk_path=tmp_path / name, disk_size=size) as sidecar:
        assert sidecar.get("/readyz") == "ready\n"
        assert reason in sidecar.stats()["disk"]["off_reason"]
        assert "The disk tier is off: --disk-path: " in sidecar.log
        assert 'lmcache_tier_reachable{tier="disk"} 0.0' in sidecar.get("/metrics")
        with session_of(sidecar) as session:
            store(session, 1)
            assert session.lookup("r", [(0, make_keys(1))]).num_leased == 1


def test_admit_on_reuse_writes_only_hit_rows(tmp_path):
    with SidecarProcess(disk_path=tmp_path, admit="OnReuse") as sidecar, session_of(sidecar) as session:
        store(session, 1, 2, 3)
        sidecar.settled()  # a hit long before the row has a checksum writes nothing
        load(session, session, "r", 1, 2)
        sidecar.wait_until(lambda stats: stats["disk"]["written"] == 2)
        assert sidecar.terminate() == 0
    assert len(list(tmp_path.rglob("*.0"))) == 2


def test_stats_show_tenants_and_prefill_rates(tmp_path):
    with SidecarProcess(disk_path=tmp_path) as sidecar, RawClient(sidecar) as client:
        client.attach()
        client.call(RESERVE, group=0, keys=make_keys(1, 2), tenant=b"\xab" * 32)
        client.call(RESERVE, group=0, keys=make_keys(3))
        memory = sidecar.stats()["memory"]
        assert memory["tenant_rows"] == {"ab" * 8: 2, "none": 1, "other": 0}
        assert memory["tenant_bytes"] == {
            name: num_rows * memory["capacity_bytes"] // memory["capacity_rows"]
            for name, num_rows in memory["tenant_rows"].items()
        }
        metrics = sidecar.get("/metrics")
        assert 'lmcache_tenant_rows{tenant="default"} 3.0' in metrics
        assert "abab" not in metrics
        with session_of(sidecar) as session:
            session.lookup("r", [(0, make_keys(9))], prefill_tokens_per_second=1234.5)
            rates = [client["prefill_tokens_per_second"] for client in sidecar.stats()["clients"]]
            assert sorted(rates) == [0.0, 1234.5]


HUNG = """
import os, runpy, time
real = os.pwritev
os.pwritev = lambda fd, parts, *rest: time.sleep(1e6) if len(parts[1]) > 4096 else real(fd, parts, *rest)
runpy.run_module("lmcache_sidecar", run_name="__main__")
"""


def test_sigterm_ends_a_sidecar_with_a_hanging_disk(tmp_path):
    """A write that hangs in the kernel."""
    sidecar = SidecarProcess(disk_path=tmp_path / "tier", disk_size="8Mi", drain_grace_seconds=0.5)
    sidecar.program = ["-c", HUNG]
    with sidecar:
        with session_of(sidecar) as session:
            store(session, 1, 2, 3)
            sidecar.wait_until(lambda stats: stats["num_unwritten_rows"] == 3)
        assert sidecar.terminate() == 0
        assert "3 rows were not written through within the grace period" in sidecar.log
