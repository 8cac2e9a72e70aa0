"""A sidecar that is killed, frozen or absent: what its clients notice, and what is lost."""

from __future__ import annotations

import os

import numpy as np
import pytest

from lmcache.rpc import kvcache_pb2 as pb
from lmcache.rpc.client import Role, SidecarClient
from lmcache.rpc.errors import SidecarUnavailableError, StaleSessionError
from lmcache.rpc.service import RESERVE, unpack_slots
from lmcache.tiers.memory.slots import ENTRY
from testing.child_process import wait_until
from testing.processes import SidecarProcess
from tests.harness.engine import assert_stored, load, store
from tests.harness.wire import RawClient, attached, make_hello, make_keys, usable


def test_a_killed_sidecar_comes_back_with_its_rows(sidecar, connect):
    client, scheduler = connect(), connect(Role.SCHEDULER)
    session = attached(client)
    old_scheduler = attached(scheduler)
    usable(sidecar)
    store(session, 1, 2, 3)
    with session.copying():
        lost = session.reserve(0, make_keys(4))[0].slot
    wait_until(lambda: load(old_scheduler, session, "before", 1, 2, 3))
    checksummed(sidecar, 3)
    sidecar.restart()

    again, again_scheduler = (
        attached(client, newer_than=session),
        attached(scheduler, newer_than=old_scheduler),
    )
    assert again.epoch > session.epoch
    usable(sidecar)
    with pytest.raises(StaleSessionError):
        session.commit([lost])
    wait_until(lambda: len(load(again_scheduler, again, "after", 1, 2, 3, 4)) == 3)
    copies = load(again_scheduler, again, "after", 1, 2, 3, 4)
    assert_stored(copies, 1, 2, 3)
    assert sidecar.stats()["memory"]["verified"] == 3
    sidecar.wait_until(lambda stats: stats["num_previous_clients"] == 0)
    store(again, 4)
    assert_stored(load(again_scheduler, again, "last", 4), 4)


def checksummed(sidecar: SidecarProcess, num_rows: int) -> None:
    """Wait until the slot table holds as many checksums: rows without are not adopted."""
    with RawClient(sidecar) as client:
        offset = client.attach()
        table = np.memmap(sidecar.arena_path, ENTRY, "r", offset.table_offset, offset.num_rows)
        wait_until(lambda: sum(any(entry.tobytes()) for entry in table["checksum"]) >= num_rows)


def test_slots_reserved_before_a_restart_stay_with_their_owner(sidecar):
    with RawClient(sidecar) as client:
        client.attach()
        (slot,) = unpack_slots(client.call(RESERVE, group=0, keys=make_keys(1)).slots)
        sidecar.restart()
        assert sidecar.stats()["memory"]["quarantined_slots"] == 1
        assert sidecar.stats()["num_previous_clients"] == 1
        with RawClient(sidecar, make_hello(engine_uuid=b"p" * 16)) as other:
            other.attach()
            usable(sidecar)
            many = other.call(RESERVE, group=0, keys=make_keys(*range(100, 200)))
            assert list(many.results) == [pb.SLOT] * 100
            assert slot.row not in [other.row for other in unpack_slots(many.slots)]
    sidecar.wait_until(lambda stats: stats["memory"]["quarantined_slots"] == 0)


def test_a_frozen_sidecar_costs_a_deadline_and_recovers(sidecar, connect):
    session = attached(connect())
    usable(sidecar)
    store(session, 1)
    sidecar.freeze()
    with pytest.raises(SidecarUnavailableError, match=r"within 0\.2 s"):
        session.lookup("r", [(0, make_keys(1))], timeout=0.2)
    late = SidecarClient(sidecar.socket_path, make_hello())
    late.start()
    wait_until(lambda: "did not answer within 2 s: is it frozen?" in late.detached_reason)
    assert late.session is None
    sidecar.thaw()
    assert session.lookup("r", [(0, make_keys(1))]).num_leased == 1
    attached(late)
    late.close()


def test_slots_of_a_store_that_was_not_answered_come_back(sidecar, connect):
    client = connect()
    session = attached(client)
    usable(sidecar)
    sidecar.freeze()
    with pytest.raises(SidecarUnavailableError), session.copying():
        session.reserve(0, make_keys(1, 2), timeout=0.1)
    sidecar.thaw()
    again = attached(client, newer_than=session)
    sidecar.wait_until(lambda stats: stats["memory"]["used_rows"] == 0)
    store(again, 1, 2)


def test_leases_whose_release_was_not_answered_end_with_the_next_one(sidecar, connect):
    session = attached(connect())
    usable(sidecar)
    store(session, 1)
    assert session.lookup("r", [(0, make_keys(1))]).num_leased == 1
    sidecar.freeze()
    with pytest.raises(SidecarUnavailableError):
        session.release(["r"], timeout=0.1)
    sidecar.thaw()
    session.release([])
    assert sidecar.stats()["memory"]["leased_rows"] == 0


def test_an_absent_sidecar_costs_nothing_and_is_found_when_it_comes():
    with SidecarProcess() as sidecar:
        sidecar.kill()
        changes = []
        client = SidecarClient(sidecar.socket_path, make_hello(), on_change=lambda: changes.append(1))
        client.start()
        wait_until(lambda: "not attached yet" not in client.detached_reason)
        assert client.session is None
        sidecar.start()
        attached(client)
        wait_until(lambda: changes)  # told a moment after the session is there
        assert changes == [1]
        client.close()
        client.close()


def test_without_a_socket_the_reason_says_so(tmp_path):
    client = SidecarClient(str(tmp_path / "kvcache.sock"), make_hello())
    client.start()
    wait_until(lambda: "no socket at" in client.detached_reason)
    client.close()


def test_a_forked_child_is_detached_and_leaves_the_lock_alone(sidecar, connect):
    client = connect()
    session = attached(client)
    usable(sidecar)
    if (pid := os.fork()) == 0:
        try:
            session.lookup("r", [(0, make_keys(1))])
        except SidecarUnavailableError:
            client.close()
            os._exit(0 if client.session is None else 3)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    store(session, 1)
    assert sidecar.stats()["clients"][0]["is_attached"]
