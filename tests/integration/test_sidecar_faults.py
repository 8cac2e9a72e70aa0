"""A sidecar that is killed, frozen or absent, as its clients see it."""

import os

import pytest

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_client.rpc.client import SidecarClient
from lmcache_client.rpc.errors import SidecarUnavailableError, StaleSessionError
from lmcache_client.rpc.hello import Role
from lmcache_client.rpc.service import RESERVE, unpack_slots
from testing.child_process import wait_until
from testing.deadlines import CALLS
from tests.harness.engine import assert_stored, load, store
from tests.harness.sidecar.wire import RawClient, attached, make_hello, make_keys, usable

DEADLINES = CALLS


def test_restarted_sidecar_serves_its_rows_again(sidecar, connect):
    client, scheduler = connect(), connect(Role.SCHEDULER)
    session = attached(client)
    old_scheduler = attached(scheduler)
    usable(sidecar)
    store(session, 1, 2, 3)
    with session.copying():
        lost_slot = session.reserve(0, make_keys(4))[0].slot
    wait_until(lambda: load(old_scheduler, session, "before", 1, 2, 3))
    sidecar.settled()  # rows without a checksum are not adopted
    sidecar.restart()

    new_session = attached(client, newer_than=session)
    new_scheduler = attached(scheduler, newer_than=old_scheduler)
    assert new_session.epoch > session.epoch
    usable(sidecar)
    with pytest.raises(StaleSessionError):
        session.commit([lost_slot])
    wait_until(lambda: len(load(new_scheduler, new_session, "after", 1, 2, 3, 4)) == 3)
    copies = load(new_scheduler, new_session, "after", 1, 2, 3, 4)
    assert_stored(copies, 1, 2, 3)
    assert sidecar.stats()["memory"]["verified"] == 3
    sidecar.wait_until(lambda stats: stats["num_previous_clients"] == 0)
    store(new_session, 4)
    assert_stored(load(new_scheduler, new_session, "last", 4), 4)


def test_slots_reserved_before_a_restart_are_quarantined(sidecar):
    with RawClient(sidecar) as client:
        client.attach()
        (slot,) = unpack_slots(client.call(RESERVE, group=0, keys=make_keys(1)).slots)
        sidecar.restart()
        assert sidecar.stats()["memory"]["quarantined_slots"] == 1
        assert sidecar.stats()["num_previous_clients"] == 1
        with RawClient(sidecar, make_hello(engine_uuid=b"p" * 16)) as second:
            second.attach()
            usable(sidecar)
            many = second.call(RESERVE, group=0, keys=make_keys(*range(100, 200)))
            assert list(many.results) == [pb.SLOT] * 100
            assert slot.row not in [other_slot.row for other_slot in unpack_slots(many.slots)]
    sidecar.wait_until(lambda stats: stats["memory"]["quarantined_slots"] == 0)


def test_frozen_sidecar_costs_one_deadline_and_recovers(sidecar, attach):
    session = attach()
    store(session, 1)
    sidecar.freeze()
    with pytest.raises(SidecarUnavailableError, match=r"within 0\.2 s"):
        session.lookup("r", [(0, make_keys(1))], timeout=0.2)  # real time: the sidecar is frozen
    late = SidecarClient(sidecar.socket_path, make_hello())
    late.start()
    wait_until(lambda: "did not answer within 2 s: is it frozen?" in late.detached_reason)
    assert late.session is None
    sidecar.thaw()
    assert session.lookup("r", [(0, make_keys(1))]).num_leased == 1
    attached(late)
    late.close()


def test_unanswered_release_is_repeated_with_the_next_one(sidecar, attach):
    session = attach()
    store(session, 1)
    assert session.lookup("r", [(0, make_keys(1))]).num_leased == 1
    sidecar.freeze()
    with pytest.raises(SidecarUnavailableError):
        session.release(["r"], timeout=0.1)  # real time: the sidecar is frozen
    sidecar.thaw()
    session.release([])
    assert sidecar.stats()["memory"]["leased_rows"] == 0


def test_forked_child_is_detached_and_does_not_release_the_lock(sidecar, connect):
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
