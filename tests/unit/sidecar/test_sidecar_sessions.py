"""Sessions: who may use which rows, under which epoch, and until when."""

from __future__ import annotations

import os

import pytest
from lmcache_sidecar.clients import liveness
from lmcache_sidecar.clients.liveness import GRACE_SECONDS, LivenessMonitor
from lmcache_sidecar.clients.validation import RefusedError

from lmcache.rpc import kvcache_pb2 as pb
from lmcache.rpc import service
from lmcache.rpc.client import KVGroup, Role
from tests.harness.world import FakeLock, new_uuid, world

__all__ = ["world"]

# ---- epochs and streams ----


def test_a_second_stream_of_a_client_ends_the_first(world):
    first = world.attach(client_uuid := new_uuid())
    reserved = world.reserve(first, 1)
    second = world.attach(client_uuid)
    assert not first.is_attached
    with pytest.raises(RefusedError, match=f"epoch {first.epoch} is over"):
        world.commit(first, reserved.slots)
    with pytest.raises(RefusedError, match="nothing was committed"):
        world.commit(second, reserved.slots)
    world.sessions.clients.detach(first)  # the server notices late
    assert second.is_attached


def test_drained_of_an_older_epoch_is_refused(world):
    first = world.attach(client_uuid := new_uuid())
    world.reserve(first, 1)
    second = world.attach(client_uuid)
    with pytest.raises(RefusedError, match="attach again"):
        world.sessions.clients.drained(second, pb.Drained(epoch=first.epoch))
    assert world.sessions.store.memory.num_quarantined == 1


def test_what_arrives_late_on_a_stream_that_was_replaced_frees_nothing(world):
    first = world.attach(client_uuid := new_uuid())
    world.reserve(first, 1)
    world.attach(client_uuid)
    with pytest.raises(RefusedError, match="attach again"):
        world.drain(first)  # said before the reservation, which may be copied into now
    assert world.sessions.store.memory.num_quarantined == 1


def test_slots_are_counted_before_they_are_unpacked(world, monkeypatch):
    """Else one message of 4 MiB would hold all clients up for a tenth of a second."""
    client = world.attach(new_uuid())
    monkeypatch.setattr(service, "unpack_slots", lambda packed: pytest.fail("they are too many"))
    with pytest.raises(RefusedError, match="at most 256"):
        world.commit(client, bytes(257 * service.SLOT_BYTES))


def test_leases_outlive_a_stream_and_end_with_the_last_client_of_the_engine(world):
    worker, scheduler = world.attach(new_uuid()), world.attach(new_uuid(), Role.SCHEDULER)
    reserved = world.reserve(worker, 1)
    world.commit(worker, reserved.slots)
    assert world.lookup(scheduler, "r", 1).num_leased == 1
    world.sessions.clients.detach(scheduler)
    world.die(scheduler.peer.uuid)
    world.pass_time(GRACE_SECONDS)
    memory = world.sessions.store.memory
    assert memory.num_leased == 1  # the worker may be loading
    world.sessions.clients.detach(worker)
    world.die(worker.peer.uuid)
    world.pass_time(GRACE_SECONDS)
    assert memory.num_leased == 0


def test_all_groups_are_answered_together_under_one_lease(world):
    groups = (KVGroup(0, 16, 4096), KVGroup(1, 16, 4096))
    worker = world.attach(new_uuid(), groups=groups)
    world.commit(worker, world.reserve(worker, 1, 2, 3).slots)
    request = pb.LookupRequest(epoch=worker.epoch, client_uuid=worker.peer.uuid, request_id="r")
    for group, numbers in ((1, (1, 9)), (0, (2, 3))):
        request.groups.add(group=group, keys=b"".join(bytes([number]) * 64 for number in numbers))
    found = world.sessions.lookup(request)
    assert (found.num_resident, found.num_leased, found.num_pending) == (1, 1, 0)
    assert world.sessions.store.memory.num_leased == 3
    world.sessions.release(
        pb.ReleaseRequest(epoch=worker.epoch, client_uuid=worker.peer.uuid, request_ids=["r"])
    )
    assert world.sessions.store.memory.num_leased == 0


# ---- proof of death ----


def test_death_takes_the_lock_and_the_grace(tmp_path):
    FakeLock.held = {"a"}
    deaths, now = [], [0.0]
    watch = LivenessMonitor(deaths.append, lambda: now[0])
    watch.watch(b"a", FakeLock(tmp_path / "a.lock"))
    now[0] = 1000.0
    watch.step()
    assert deaths == []
    FakeLock.held.clear()
    watch.step()
    now[0] += GRACE_SECONDS - 0.01
    watch.step()
    assert deaths == []
    now[0] += 0.02
    watch.step()
    watch.step()
    assert deaths == [b"a"]


def lock_name(number: int) -> str:
    return f"{number:032x}.lock"


def test_a_lock_file_that_vanishes_is_nobody_s(tmp_path):
    (tmp_path / lock_name(1)).touch()
    (probe,) = liveness.probes_in(tmp_path).values()
    (tmp_path / lock_name(1)).unlink()
    assert not probe.is_held()
    probe.remove()


def test_what_is_no_lock_file_never_stops_the_start(tmp_path, caplog):
    (tmp_path / lock_name(1)).touch()
    (tmp_path / lock_name(2)).mkdir()
    (tmp_path / lock_name(3)).symlink_to(tmp_path / lock_name(1))
    os.mkfifo(tmp_path / lock_name(4))
    (tmp_path / "x.lock").touch()
    assert list(liveness.probes_in(tmp_path)) == [(1).to_bytes(16)]
    assert len(caplog.messages) == 1
    assert "3 entries of" in caplog.text


def test_who_comes_back_in_time_is_not_dead(tmp_path):
    FakeLock.held.clear()
    deaths, now = [], [0.0]
    watch = LivenessMonitor(deaths.append, lambda: now[0])
    watch.watch(b"a", FakeLock(tmp_path / "a.lock"))
    watch.step()
    watch.forget(b"a")
    now[0] = 10.0
    watch.step()
    assert deaths == []
