"""Stores and loads of rows with a real sidecar process, and engines that fail."""

import pytest

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_client.rpc import service
from lmcache_client.rpc.client import SidecarClient
from lmcache_client.rpc.errors import StaleSessionError
from lmcache_client.rpc.hello import Role
from lmcache_client.rpc.service import RESERVE, unpack_slots
from lmcache_store.tiers.errors import ArenaError
from lmcache_store.tiers.memory.contracts import Reserved
from lmcache_store.tiers.memory.mapping import MappedColumn
from testing.child_process import wait_until
from testing.cuda_peers import peer
from testing.deadlines import CALLS
from tests.harness.engine import assert_stored, load, mapped_slots, store
from tests.harness.sidecar.wire import RawClient, attached, make_hello, make_keys, slots_of, usable

DEADLINES = CALLS


def test_stored_rows_are_loaded_byte_for_byte(sidecar, attach):
    scheduler, worker = attach(Role.SCHEDULER), attach()
    store(worker, 1, 2, 3)
    assert_stored(load(scheduler, worker, "r", 1, 2, 3, 4), 1, 2, 3)
    assert worker.reserve(0, make_keys(2))[0].result is Reserved.EXISTS
    assert scheduler.slots is None
    memory = sidecar.stats()["memory"]
    assert (memory["used_rows"], memory["leased_rows"], memory["quarantined_slots"]) == (3, 0, 0)


def test_many_keys_are_split_over_several_calls(sidecar, connect):
    worker, scheduler = (attached(connect(role, chunk_bytes=4096)) for role in (Role.WORKER, Role.SCHEDULER))
    usable(sidecar)
    keys = make_keys(*range(2 * service.MAX_KEYS_PER_CALL + 10))
    with worker.copying():
        reserved = worker.reserve(0, keys)
        worker.commit([reservation.slot for reservation in reserved])
    result = scheduler.lookup("r", [(0, keys + make_keys(10**6))])
    assert result.num_resident == result.num_leased == len(reserved)
    assert slots_of(scheduler, keys) == [reservation.slot for reservation in reserved]
    reserved = worker.reserve(0, make_keys(*range(10**6, 10**6 + service.MAX_KEYS_PER_CALL + 1)))
    with worker.copying():
        worker.abort([reservation.slot for reservation in reserved])
    assert scheduler.lookup("other", [(0, make_keys(10**6))], hint=True).num_pending == 0


@pytest.mark.parametrize("request_id", ["r" * 300, "", "é" * 200, "\ud800"])
def test_any_request_id_can_be_leased_and_released(sidecar, request_id, attach):
    session = attach()
    store(session, 1)
    for name in (request_id, "another"):
        assert session.lookup(name, [(0, make_keys(1))]).num_leased == 1
    session.release([request_id, "another"])
    assert sidecar.stats()["memory"]["leased_rows"] == 0


def test_client_reports_why_it_cannot_populate(sidecar, connect, monkeypatch):
    def fail(*_):
        raise ArenaError("out of memory")

    monkeypatch.setattr(MappedColumn, "populate", fail)
    client = connect()
    wait_until(lambda: client.detached_reason == "out of memory")


# ---- faults of the engine, which is a process of its own ----


def reserve(state, socket_path, keys):
    """Reserve slots and fill half of each."""
    state["client"] = SidecarClient(socket_path, make_hello())
    state["client"].start()
    session = attached(state["client"])
    slots = wait_until(lambda: all_slots(session.reserve(0, keys)))
    for slot in slots:
        mapped_slots(session)[slot.row, : mapped_slots(session).shape[1] // 2] = 0xAB


def all_slots(reserved):
    slots = [reservation.slot for reservation in reserved]
    return slots if all(slots) else None


def test_slots_of_a_killed_worker_are_freed_after_proof_of_death(sidecar, connect):
    scheduler = attached(connect(Role.SCHEDULER))
    with peer() as victim:
        victim.call(reserve, sidecar.socket_path, make_keys(1, 2, 3))
        victim.process.kill()
        sidecar.wait_until(lambda stats: stats["memory"]["quarantined_slots"] == 3)
    assert scheduler.lookup("r", [(0, make_keys(1, 2, 3))]).num_resident == 0
    sidecar.wait_until(lambda stats: stats["memory"]["quarantined_slots"] == 0)
    assert sidecar.stats()["memory"]["used_rows"] == 0
    assert len(list((sidecar.folder / "clients").iterdir())) == 1  # only the scheduler's file is left


def test_process_removes_its_lock_file_when_it_ends(sidecar):
    with peer() as client:
        client.call(reserve, sidecar.socket_path, make_keys(1))
        client._connection.close()
        client.process.join(60)
        assert client.process.exitcode == 0
    assert list((sidecar.folder / "clients").iterdir()) == []
    sidecar.wait_until(lambda stats: stats["memory"]["used_rows"] == 0 and not stats["clients"])


def test_slots_of_a_live_client_stay_quarantined_until_drained(sidecar):
    # This process holds the lock all the time, so that only Drained may free the slots.
    with RawClient(sidecar) as client, peer() as victim:
        client.attach()
        reserved = client.call(RESERVE, group=0, keys=make_keys(1, 2))
        assert list(reserved.results) == [pb.SLOT, pb.SLOT]
        victim.call(reserve, sidecar.socket_path, make_keys(3))
        client.break_stream()
        sidecar.wait_until(lambda stats: stats["memory"]["quarantined_slots"] == 2)
        old_epoch = client.epoch
        victim.process.kill()
        sidecar.wait_until(lambda stats: stats["memory"]["quarantined_slots"] == 3)
        # When the victim's slots are freed, the grace period has passed for the first client, too.
        sidecar.wait_until(lambda stats: stats["memory"]["quarantined_slots"] < 3)
        assert sidecar.stats()["memory"]["quarantined_slots"] == 2

        client.attach()
        assert client.epoch > old_epoch
        (new_slot,) = unpack_slots(client.call(RESERVE, group=0, keys=make_keys(1)).slots)
        assert new_slot.row not in [slot.row for slot in unpack_slots(reserved.slots)]
        assert sidecar.stats()["memory"]["quarantined_slots"] == 2
        client.send(drained=pb.Drained(epoch=client.epoch))
        sidecar.wait_until(lambda stats: stats["memory"]["quarantined_slots"] == 0)
        assert sidecar.stats()["memory"]["used_rows"] == 1  # the row reserved in the new epoch


def test_client_reports_drained_after_its_copies_ended(sidecar, connect):
    client = connect()
    session = attached(client)
    usable(sidecar)
    with session.copying():
        session.reserve(0, make_keys(1))
        client._attachment.cancel()
        attached(client, newer_than=session)
        assert sidecar.stats()["memory"]["quarantined_slots"] == 1
        with pytest.raises(StaleSessionError), session.copying():
            pass
    sidecar.wait_until(lambda stats: stats["memory"]["quarantined_slots"] == 0)
