"""Sessions: which client may use which rows, in which epoch, and for how long."""

import os

import pytest

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_client.rpc import service
from lmcache_client.rpc.hello import Role
from lmcache_sidecar.clients import liveness
from lmcache_sidecar.clients.liveness import GRACE_SECONDS, LivenessMonitor
from lmcache_sidecar.clients.registry import HOLD_SECONDS
from lmcache_sidecar.clients.validation import CallRefusedError
from lmcache_store.kv_groups import KVGroup
from tests.harness.sidecar.world import FakeLock, new_uuid, world

__all__ = ["world"]

# ---- epochs and streams ----


def test_second_stream_of_a_client_ends_the_first(world):
    first = world.attach(client_uuid := new_uuid())
    reserved = world.reserve(first, 1)
    second = world.attach(client_uuid)
    assert not first.is_attached
    with pytest.raises(CallRefusedError, match=f"epoch {first.epoch} is over"):
        world.commit(first, reserved.slots)
    with pytest.raises(CallRefusedError, match="nothing was committed"):
        world.commit(second, reserved.slots)
    world.sessions.clients.detach(first)  # the server detects this late
    assert second.is_attached


def test_engines_say_on_which_numa_nodes_their_gpus_are(world):
    first = world.attach(new_uuid(), num_columns=2, numa_nodes=(1, 0))
    assert world.sessions.arena.column_nodes == (1, 0)
    world.attach(new_uuid(), num_columns=2)  # does not know
    assert world.sessions.arena.column_nodes == (1, 0)
    second = world.attach(new_uuid(), num_columns=2, numa_nodes=(0, 1))  # another data-parallel rank
    assert world.sessions.arena.column_nodes == ()
    for client in first, second:
        world.sessions.clients.detach(client)
    world.attach(new_uuid(), num_columns=2, numa_nodes=(2**32 - 1, 1))  # its engine was moved to other GPUs
    assert world.sessions.arena.column_nodes == (2**32 - 1, 1)


def test_late_message_of_a_replaced_stream_frees_no_slot(world):
    first = world.attach(client_uuid := new_uuid())
    world.reserve(first, 1)
    second = world.attach(client_uuid)
    for client in first, second:  # sent before the reservation, whose copy may be in progress
        with pytest.raises(CallRefusedError, match="attach again"):
            world.sessions.clients.note_drained(client, pb.Drained(epoch=first.epoch))
    assert world.sessions.store.memory.num_quarantined == 1


def test_slots_are_counted_before_they_are_unpacked(world, monkeypatch):
    """Otherwise a message of 4 MiB would block all clients for a tenth of a second."""
    client = world.attach(new_uuid())
    monkeypatch.setattr(
        service, "unpack_slots", lambda packed: pytest.fail("too many slots must not be unpacked")
    )
    with pytest.raises(CallRefusedError, match="at most 256"):
        world.commit(client, bytes(257 * service.SLOT_BYTES))


def test_leases_end_with_the_last_client_of_the_engine(world):
    worker, scheduler = world.attach(new_uuid()), world.attach(new_uuid(), Role.SCHEDULER)
    reserved = world.reserve(worker, 1)
    world.commit(worker, reserved.slots)
    assert world.lookup(scheduler, "r", 1).num_leased == 1
    world.sessions.clients.detach(scheduler)
    world.die(scheduler.peer.uuid)
    world.pass_time(GRACE_SECONDS)
    memory = world.sessions.store.memory
    assert memory.num_leased == 1  # the worker may still load
    world.sessions.clients.detach(worker)
    world.die(worker.peer.uuid)
    world.pass_time(GRACE_SECONDS)
    assert memory.num_leased == 0


# ---- clients with different geometries ----

OTHER = {"engine_uuid": b"o" * 16, "groups": (KVGroup(0, 16, 8192),)}


def test_relayed_lookup_of_a_worker_takes_a_lease_that_is_not_counted(world):
    worker = world.attach(new_uuid())
    world.commit(worker, world.reserve(worker, 1).slots)
    memory = world.sessions.store.memory
    assert world.lookup(worker, "r", 1, 2, relayed=True).num_leased == 1
    assert (memory.num_leased, memory.stats.hits, memory.stats.misses) == (1, 0, 0)
    world.lookup(worker, "r", 1, 2)  # such as SGLang's workers
    assert (memory.stats.hits, memory.stats.misses) == (1, 1)


def test_client_without_calls_gives_the_format_to_an_engine_that_needs_another(world):
    idle = world.attach(new_uuid(), model="squatter")
    world.now += HOLD_SECONDS - 1
    again = world.attach(idle.peer.uuid, model="squatter")  # starts no new time
    with pytest.raises(CallRefusedError, match="such as the worker of column 0"):
        world.attach(new_uuid(), **OTHER)
    assert "model 'squatter'" in world.sessions.attach_refusal
    world.now += 2
    engine = world.attach(new_uuid(), **OTHER)
    world.reserve(engine, 1)
    assert not again.is_attached
    with pytest.raises(CallRefusedError, match="attach again"):
        world.lookup(again, "r", 1)


@pytest.mark.parametrize("is_reattached", [False, True])
def test_client_that_made_a_call_keeps_the_format(world, is_reattached):
    """A client with slots may copy into them for an unknown time."""
    first = world.attach(new_uuid())
    world.reserve(first, 1)
    if is_reattached:
        world.attach(first.peer.uuid)
    world.now += 100 * HOLD_SECONDS
    with pytest.raises(CallRefusedError, match="stop those engines"):
        world.attach(new_uuid(), **OTHER)


def test_client_of_an_earlier_sidecar_keeps_the_format_with_its_rows(world):
    world.sessions.clients.previous.add(client_uuid := new_uuid())
    client = world.attach(client_uuid)
    world.sessions.clients.note_drained(client, pb.Drained(epoch=client.epoch))
    world.now += 100 * HOLD_SECONDS
    with pytest.raises(CallRefusedError, match="stop those engines"):
        world.attach(new_uuid(), **OTHER)


# ---- proof of death ----


def test_death_needs_a_free_lock_and_the_grace_period(tmp_path):
    FakeLock.held = {"a"}
    deaths, now = [], [0.0]
    monitor = LivenessMonitor(deaths.append, lambda: now[0])
    monitor.watch(b"a", FakeLock(tmp_path / "a.lock"))
    now[0] = 1000.0
    monitor.step()
    assert deaths == []
    FakeLock.held.clear()
    monitor.step()
    now[0] += GRACE_SECONDS - 0.01
    monitor.step()
    assert deaths == []
    now[0] += 0.02
    monitor.step()
    monitor.step()
    assert deaths == [b"a"]


def lock_name(number: int) -> str:
    return f"{number:032x}.lock"


def test_removed_lock_file_is_not_held(tmp_path):
    (tmp_path / lock_name(1)).touch()
    (probe,) = liveness.probes_in(tmp_path).values()
    (tmp_path / lock_name(1)).unlink()
    assert not probe.is_held()
    probe.remove()


def test_other_files_do_not_stop_the_start(tmp_path, caplog):
    (tmp_path / lock_name(1)).touch()
    (tmp_path / lock_name(2)).mkdir()
    (tmp_path / lock_name(3)).symlink_to(tmp_path / lock_name(1))
    os.mkfifo(tmp_path / lock_name(4))
    (tmp_path / "x.lock").touch()
    assert list(liveness.probes_in(tmp_path)) == [(1).to_bytes(16)]
    assert len(caplog.messages) == 1
    assert "3 entries of" in caplog.text


def test_client_that_reattaches_in_time_is_not_dead(tmp_path):
    FakeLock.held.clear()
    deaths, now = [], [0.0]
    monitor = LivenessMonitor(deaths.append, lambda: now[0])
    monitor.watch(b"a", FakeLock(tmp_path / "a.lock"))
    monitor.step()
    monitor.forget(b"a")
    now[0] = 10.0
    monitor.step()
    assert deaths == []
