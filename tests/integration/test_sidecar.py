"""A real sidecar process, real clients, real faults."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error

import grpc
import numpy as np
import pytest
from lmcache_sidecar.metrics import FAMILIES

from lmcache.rpc import kvcache_pb2 as pb
from lmcache.rpc import service
from lmcache.rpc.client import KVGroup, Role, Session, SidecarClient
from lmcache.rpc.errors import SidecarError, SidecarUnavailable, StaleSession
from lmcache.rpc.service import ABORT, COMMIT, LOOKUP, RELEASE, RESERVE
from lmcache.tiers.base import Reserved
from lmcache.tiers.slots import ENTRY
from tests.harness.redis_server import RedisServer
from tests.harness.sidecar import REPOSITORY, SidecarProcess, wait_until
from tests.harness.wire import ClientProcess, RawClient, attached, make_hello, make_keys, usable

CHUNK_BYTES = 100_000


@pytest.fixture
def sidecar():
    with SidecarProcess() as process:
        yield process


@pytest.fixture
def connect(sidecar):
    clients = []

    def make(*arguments, **fields) -> SidecarClient:
        clients.append(SidecarClient(sidecar.socket_path, make_hello(*arguments, **fields)))
        clients[-1].start()
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def payload(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, CHUNK_BYTES, dtype=np.uint8)


def store(session: Session, *numbers: int) -> None:
    with session.copying():
        slots = [reservation.slot for reservation in session.reserve(0, make_keys(*numbers))]
        for slot, number in zip(slots, numbers, strict=True):
            session.slots[slot.row, :CHUNK_BYTES] = payload(number)
        session.commit(slots)


def load(scheduler: Session, worker: Session, request_id: str, *numbers: int) -> list[np.ndarray]:
    """Lease, copy, check, release."""
    found = scheduler.lookup(request_id, [(0, make_keys(*numbers))])
    with worker.copying():
        copies = [worker.slots[slot.row, :CHUNK_BYTES].copy() for slot in found.slots.get(0, [])]
        assert all(worker.holds(slot) for slot in found.slots.get(0, []))
    scheduler.release([request_id])
    return copies


def assert_stored(copies: list[np.ndarray], *numbers: int) -> None:
    assert len(copies) == len(numbers)
    for copy, number in zip(copies, numbers, strict=True):
        assert np.array_equal(copy, payload(number))


# ---- the ordinary case ----


def test_what_was_stored_is_loaded_byte_for_byte(sidecar, connect):
    scheduler, worker = attached(connect(Role.SCHEDULER)), attached(connect())
    usable(sidecar)
    store(worker, 1, 2, 3)
    assert_stored(load(scheduler, worker, "r", 1, 2, 3, 4), 1, 2, 3)
    assert worker.reserve(0, make_keys(2))[0].result is Reserved.EXISTS
    assert scheduler.slots is None
    memory = sidecar.stats()["memory"]
    assert (memory["used_rows"], memory["leased_rows"], memory["quarantined_slots"]) == (3, 0, 0)


def test_a_row_is_visible_when_all_ranks_committed(sidecar, connect):
    scheduler = attached(connect(Role.SCHEDULER, num_columns=2))
    ranks = [attached(connect(num_columns=2, column=column)) for column in range(2)]
    usable(sidecar)
    store(ranks[0], 1)
    assert scheduler.lookup("r", [(0, make_keys(1))]).num_resident == 0
    store(ranks[1], 1)
    found = scheduler.lookup("r", [(0, make_keys(1))])
    assert found.num_leased == 1
    for rank in ranks:
        assert np.array_equal(rank.slots[found.slots[0][0].row, :CHUNK_BYTES], payload(1))
    assert not np.shares_memory(ranks[0].slots, ranks[1].slots)


def test_nothing_is_offered_before_all_ranks_have_mapped(sidecar, connect):
    scheduler = attached(connect(Role.SCHEDULER, num_columns=2))
    rank = attached(connect(num_columns=2))
    sidecar.wait_until(lambda stats: any(client["mapped_rows"] for client in stats["clients"]))
    assert rank.reserve(0, make_keys(1))[0].result is Reserved.BUSY
    assert scheduler.lookup("r", [(0, make_keys(1))]).num_resident == 0


def test_releases_that_did_not_arrive_are_sent_after_the_next_attach(sidecar, connect):
    scheduler, worker = connect(Role.SCHEDULER), attached(connect())
    usable(sidecar)
    store(worker, 1)
    old = attached(scheduler)
    assert old.lookup("r", [(0, make_keys(1))]).num_leased == 1
    scheduler._attachment.cancel()
    wait_until(lambda: old.is_over)
    with pytest.raises(StaleSession):
        old.release(["r"])
    attached(scheduler, newer_than=old).release([])
    sidecar.wait_until(lambda stats: stats["memory"]["leased_rows"] == 0)


# ---- faults of the engine ----


def test_a_killed_worker_leaves_nothing_visible_and_its_slots_come_back_only_after_the_proof(
    sidecar, connect
):
    scheduler = attached(connect(Role.SCHEDULER))
    with ClientProcess(sidecar.socket_path) as victim:
        victim.reserve(make_keys(1, 2, 3))
        victim.kill()
        killed = time.monotonic()
        sidecar.wait_until(lambda stats: stats["memory"]["quarantined_slots"] == 3)
    assert scheduler.lookup("r", [(0, make_keys(1, 2, 3))]).num_resident == 0
    sidecar.wait_until(lambda stats: stats["memory"]["quarantined_slots"] == 0)
    assert time.monotonic() - killed >= 2.0
    assert sidecar.stats()["memory"]["used_rows"] == 0
    assert len(list((sidecar.folder / "clients").iterdir())) == 1  # the scheduler's


def test_a_process_that_ends_in_order_takes_its_lock_file_with_it(sidecar):
    with ClientProcess(sidecar.socket_path) as client:
        client.reserve(make_keys(1))
        assert client.leave() == 0
    assert list((sidecar.folder / "clients").iterdir()) == []
    sidecar.wait_until(lambda stats: stats["memory"]["used_rows"] == 0 and not stats["clients"])


def test_a_broken_stream_of_a_live_client_frees_nothing_until_it_says_drained(sidecar):
    # The lock is held by this process the whole time, so nothing but Drained may free the slots.
    with RawClient(sidecar) as client:
        client.attach()
        reserved = client.call(RESERVE, group=0, keys=make_keys(1, 2))
        assert list(reserved.results) == [pb.SLOT, pb.SLOT]
        client.break_stream()
        sidecar.wait_until(lambda stats: stats["memory"]["quarantined_slots"] == 2)
        old_epoch = client.epoch
        time.sleep(2.6)  # longer than the grace after a death: it must not matter
        assert sidecar.stats()["memory"]["quarantined_slots"] == 2

        client.attach()
        assert client.epoch > old_epoch
        assert client.call(RESERVE, group=0, keys=make_keys(1)).rows[0] not in reserved.rows
        assert sidecar.stats()["memory"]["quarantined_slots"] == 2
        client.say(drained=pb.Drained(epoch=client.epoch))
        sidecar.wait_until(lambda stats: stats["memory"]["quarantined_slots"] == 0)
        assert sidecar.stats()["memory"]["used_rows"] == 1  # what was reserved in the new epoch


def test_the_client_says_drained_only_when_its_copies_have_ended(sidecar, connect):
    client = connect()
    session = attached(client)
    usable(sidecar)
    with session.copying():
        session.reserve(0, make_keys(1))
        client._attachment.cancel()
        attached(client, newer_than=session)
        sidecar.wait_until(lambda stats: stats["clients"][0]["mapped_rows"] == stats["memory"]["num_rows"])
        assert sidecar.stats()["memory"]["quarantined_slots"] == 1
        with pytest.raises(StaleSession), session.copying():
            pass
    sidecar.wait_until(lambda stats: stats["memory"]["quarantined_slots"] == 0)


def test_leases_of_a_dead_engine_end(sidecar, connect):
    worker = attached(connect(engine_uuid=b"o" * 16))
    usable(sidecar)
    store(worker, 1)
    with RawClient(sidecar, make_hello(engine_uuid=b"p" * 16)) as other:
        other.attach()
        sidecar.wait_until(
            lambda stats: (
                other.call(
                    LOOKUP, request_id="r", groups=[pb.GroupKeys(group=0, keys=make_keys(1))]
                ).num_leased
            )
        )
        other.break_stream()
        assert sidecar.stats()["memory"]["leased_rows"] == 1
    sidecar.wait_until(lambda stats: stats["memory"]["leased_rows"] == 0)


# ---- faults of the sidecar ----


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
    with pytest.raises(StaleSession):
        session.commit([lost])
    wait_until(lambda: len(load(again_scheduler, again, "after", 1, 2, 3, 4)) == 3)
    copies = load(again_scheduler, again, "after", 1, 2, 3, 4)
    assert_stored(copies, 1, 2, 3)
    assert sidecar.stats()["promotions"]["verified"] == 3
    sidecar.wait_until(lambda stats: stats["num_clients_from_before"] == 0)
    store(again, 4)
    assert_stored(load(again_scheduler, again, "last", 4), 4)


def checksummed(sidecar: SidecarProcess, num_rows: int) -> None:
    """Wait until the slot table holds as many checksums: rows without are not adopted."""
    with RawClient(sidecar) as client:
        offset = client.attach(map_all=False)
        table = np.memmap(sidecar.arena_path, ENTRY, "r", offset.table_offset, offset.num_rows)
        wait_until(lambda: sum(any(entry.tobytes()) for entry in table["checksum"]) >= num_rows)


def test_slots_reserved_before_a_restart_stay_with_their_owner(sidecar):
    with RawClient(sidecar) as client:
        client.attach()
        row = client.call(RESERVE, group=0, keys=make_keys(1)).rows[0]
        sidecar.restart()
        assert sidecar.stats()["memory"]["quarantined_slots"] == 1
        assert sidecar.stats()["num_clients_from_before"] == 1
        with RawClient(sidecar, make_hello(engine_uuid=b"p" * 16)) as other:
            other.attach()
            usable(sidecar)
            many = other.call(RESERVE, group=0, keys=make_keys(*range(100, 200)))
            assert list(many.results) == [pb.SLOT] * 100
            assert row not in many.rows
    sidecar.wait_until(lambda stats: stats["memory"]["quarantined_slots"] == 0)


def test_a_frozen_sidecar_costs_a_deadline_and_recovers(sidecar, connect):
    session = attached(connect())
    usable(sidecar)
    store(session, 1)
    sidecar.freeze()
    started = time.monotonic()
    with pytest.raises(SidecarUnavailable, match=r"within 0\.2 s"):
        session.lookup("r", [(0, make_keys(1))], timeout=0.2)
    assert time.monotonic() - started < 1.5
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
    with pytest.raises(SidecarUnavailable), session.copying():
        session.reserve(0, make_keys(1, 2), timeout=0.1)
    sidecar.thaw()
    again = attached(client, newer_than=session)
    sidecar.wait_until(lambda stats: stats["clients"][0]["mapped_rows"] == stats["memory"]["num_rows"])
    sidecar.wait_until(lambda stats: stats["memory"]["used_rows"] == 0)
    store(again, 1, 2)


def test_leases_whose_release_was_not_answered_end_with_the_next_one(sidecar, connect):
    session = attached(connect())
    usable(sidecar)
    store(session, 1)
    assert session.lookup("r", [(0, make_keys(1))]).num_leased == 1
    sidecar.freeze()
    with pytest.raises(SidecarUnavailable):
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
        except SidecarUnavailable:
            client.close()
            os._exit(0 if client.session is None else 3)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    store(session, 1)
    assert sidecar.stats()["clients"][0]["is_attached"]


# ---- bad input ----

ONE_GROUP = [pb.GroupKeys(group=0, keys=make_keys(1))]
INVALID, PRECONDITION = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION

BAD_CALLS = [
    (LOOKUP, {"request_id": ""}, INVALID, "request_id must not be empty"),
    (LOOKUP, {"request_id": "r" * 257}, INVALID, "request_id has 257 bytes, at most 256"),
    (LOOKUP, {"request_id": "r"}, INVALID, r"groups must be each of \[0\] once"),
    (LOOKUP, {"request_id": "r", "groups": ONE_GROUP * 2}, INVALID, "groups must be each of"),
    (LOOKUP, {"request_id": "r", "groups": [pb.GroupKeys(group=7)]}, INVALID, "groups must be each of"),
    (
        LOOKUP,
        {"request_id": "r", "groups": [pb.GroupKeys(keys=b"k" * 33)]},
        INVALID,
        "33 bytes are no multiple",
    ),
    (
        LOOKUP,
        {"request_id": "r", "groups": [pb.GroupKeys(keys=b"k" * 65537 * 32)]},
        INVALID,
        "at most 65536 keys",
    ),
    (LOOKUP, {"request_id": "r", "groups": ONE_GROUP, "tenant": b"t" * 513}, INVALID, "tenant has 513 bytes"),
    (
        LOOKUP,
        {"request_id": "r", "groups": ONE_GROUP, "prefill_tokens_per_second": float("nan")},
        INVALID,
        "must be a finite number",
    ),
    (
        LOOKUP,
        {"request_id": "r", "groups": ONE_GROUP, "epoch": 1},
        PRECONDITION,
        "epoch 1 is over.*attach again",
    ),
    (LOOKUP, {"client_uuid": b"x" * 16}, PRECONDITION, "not attached: attach again"),
    (LOOKUP, {"client_uuid": b""}, PRECONDITION, "not attached: attach again"),
    (RESERVE, {"group": 7, "keys": make_keys(9)}, INVALID, "group 7 is unknown"),
    (RESERVE, {"keys": b"k" * 31}, INVALID, "31 bytes are no multiple"),
    (RESERVE, {"keys": make_keys(9), "epoch": 0}, PRECONDITION, "attach again"),
    (COMMIT, {"rows": [0, 1], "generations": [1]}, INVALID, "2 rows but 1 generations"),
    (
        COMMIT,
        {"rows": [4_000_000_000], "generations": [1]},
        INVALID,
        "row 4000000000 is out of range: the arena has",
    ),
    (COMMIT, {"rows": [0, 0], "generations": [1, 1]}, INVALID, "rows must be different"),
    (COMMIT, {"rows": [5], "generations": [1]}, PRECONDITION, "nothing was committed"),
    (COMMIT, {"rows": [0], "generations": [999]}, PRECONDITION, "nothing was committed"),
    (ABORT, {"rows": [0, 5], "generations": [1, 1]}, PRECONDITION, "nothing was aborted"),
    (ABORT, {"rows": [1 << 31], "generations": [1]}, INVALID, "out of range"),
    (RELEASE, {"request_ids": ["held", ""]}, INVALID, "request_id must not be empty"),
    (RELEASE, {"request_ids": ["held"], "epoch": 3}, PRECONDITION, "attach again"),
]


@pytest.fixture(scope="module")
def busy_client():
    """A client with one reserved and one leased row, so that a refused call has something to spoil."""
    with SidecarProcess() as process, RawClient(process) as client:
        client.attach()
        usable(process)
        client.sidecar = process
        stored = client.call(RESERVE, group=0, keys=make_keys(1))
        client.call(COMMIT, rows=stored.rows, generations=stored.generations)
        client.call(RESERVE, group=0, keys=make_keys(2))
        client.call(LOOKUP, request_id="held", groups=ONE_GROUP)
        yield client


def state_of(sidecar: SidecarProcess) -> dict[str, object]:
    stats = sidecar.stats()
    return {name: stats[name] for name in stats if name != "uptime_seconds"}


@pytest.mark.parametrize(("method", "fields", "code", "sentence"), BAD_CALLS)
def test_a_bad_call_is_refused_with_a_sentence_and_changes_nothing(
    busy_client, method, fields, code, sentence
):
    before = state_of(busy_client.sidecar)
    with pytest.raises(grpc.RpcError) as caught:
        busy_client.call(method, **fields)
    assert caught.value.code() is code
    assert re.search(sentence, caught.value.details())
    attach_again = service.reason_of(caught.value) == service.REASON_ATTACH_AGAIN
    assert attach_again == ("attach again" in sentence)
    assert state_of(busy_client.sidecar) == before


def test_an_oversized_message_is_refused(busy_client):
    before = state_of(busy_client.sidecar)
    with pytest.raises(grpc.RpcError) as caught:
        busy_client.call(RESERVE, keys=bytes(service.MAX_MESSAGE_BYTES))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert state_of(busy_client.sidecar) == before


def test_only_workers_store(busy_client):
    with RawClient(busy_client.sidecar, make_hello(Role.SCHEDULER)) as scheduler:
        scheduler.attach(map_all=False)
        for method in (RESERVE, COMMIT, ABORT):
            with pytest.raises(grpc.RpcError, match="only a worker stores"):
                scheduler.call(method)


@pytest.mark.parametrize(
    ("change", "code", "sentence"),
    [
        (
            {"protocol_version": 0},
            PRECONDITION,
            "speaks protocol 0, sidecar .* speaks 1: upgrade the engine's LMCache",
        ),
        (
            {"protocol_version": 9},
            PRECONDITION,
            "speaks protocol 9, sidecar .* speaks 1: upgrade the sidecar",
        ),
        ({"client_uuid": b"short"}, INVALID, "client_uuid must have 16 bytes, it has 5"),
        ({"client_uuid": b"\0" * 16}, PRECONDITION, "lock file can't be opened"),
        ({"engine_uuid": b""}, INVALID, "engine_uuid must have 16 bytes"),
        ({"namespace": b"n" * 31}, INVALID, "namespace must have 32 bytes, it has 31"),
        ({"role": 0}, INVALID, "role must be"),
        ({"role": 9}, INVALID, "role must be"),
        ({"column": 1}, INVALID, "column 1 is not below num_columns, 1"),
        ({"model": "m" * 513}, INVALID, "model has 513 bytes"),
        ({"namespace": b"m" * 32}, PRECONDITION, "another client of this engine_uuid"),
        ({"geometry": pb.Geometry()}, INVALID, "num_columns must be 1 to"),
        ({"geometry": pb.Geometry(num_columns=1)}, INVALID, "1 to 64 groups"),
    ],
)
def test_a_bad_hello_is_refused(busy_client, change, code, sentence):
    before = state_of(busy_client.sidecar)
    with RawClient(busy_client.sidecar) as client:
        for name, value in change.items():
            if name == "geometry":
                client.hello.geometry.CopyFrom(value)
            else:
                setattr(client.hello, name, value)
        with pytest.raises(grpc.RpcError) as caught:
            client.attach()
    assert caught.value.code() is code
    assert re.search(sentence, caught.value.details()), caught.value.details()
    assert state_of(busy_client.sidecar) == before


@pytest.mark.parametrize(
    ("group", "code", "sentence"),
    [
        (
            KVGroup(0, 16, 4096, window_tokens=512),
            PRECONDITION,
            "sliding window groups come with a later version",
        ),
        (KVGroup(0, 24, 4096), INVALID, "256, must be a multiple of the block_tokens of group 0, 24"),
        (KVGroup(0, 0, 4096), INVALID, "must be a multiple"),
        (KVGroup(0, 16, 0), INVALID, "chunk_bytes of group 0 is out of range"),
        (KVGroup(0, 16, 1 << 50), INVALID, "chunk_bytes of group 0 is out of range"),
        (KVGroup(0, 16, 8192), PRECONDITION, "another client of this engine_uuid"),
    ],
)
def test_a_bad_group_is_refused(busy_client, group, code, sentence):
    with (
        RawClient(busy_client.sidecar, make_hello(groups=(group,))) as client,
        pytest.raises(grpc.RpcError) as caught,
    ):
        client.attach()
    assert caught.value.code() is code
    assert sentence in caught.value.details()


@pytest.mark.parametrize(
    "messages",
    [
        [pb.AttachRequest()],
        [pb.AttachRequest(drained=pb.Drained(epoch=1))],
        ["hello", "hello"],
        ["hello", pb.AttachRequest(drained=pb.Drained(epoch=1))],
        ["hello", pb.AttachRequest(extents_mapped=pb.ExtentsMapped(epoch=1, num_rows=1))],
    ],
)
def test_a_stream_that_breaks_the_rules_is_ended(busy_client, messages):
    with RawClient(busy_client.sidecar) as client:
        hello = pb.AttachRequest(hello=client.hello)
        with pytest.raises(grpc.RpcError) as caught:
            list(client.open(*(hello if message == "hello" else message for message in messages)))
    assert caught.value.code() in (INVALID, PRECONDITION)


def test_more_rows_than_are_ready_can_not_be_mapped(busy_client):
    with RawClient(busy_client.sidecar) as client:
        attached = client.attach(map_all=False)
        client.say(extents_mapped=pb.ExtentsMapped(epoch=client.epoch, num_rows=attached.num_rows + 1))
        with pytest.raises(grpc.RpcError, match="rows can't be mapped"):
            list(client._stream)


def test_a_hello_without_the_lock_is_refused(busy_client):
    with RawClient(busy_client.sidecar) as client:
        path = client.lock._path
        client.lock.release()
        path.touch()
        with pytest.raises(grpc.RpcError, match="no other process holds the record lock"):
            client.attach()
        path.unlink()


def test_rubbish_is_answered_with_a_status(busy_client):
    channel = grpc.insecure_channel(f"unix:{busy_client.sidecar.socket_path}")
    for path in (LOOKUP.path, f"/{service.SERVICE}/Nothing"):
        with pytest.raises(grpc.RpcError):
            channel.unary_unary(path)(b"\xff\xff\xff", timeout=5)
    channel.close()
    assert busy_client.sidecar.stats()["clients"][0]["is_attached"]


def test_another_geometry_waits_for_the_last_engine_to_be_gone(sidecar, connect):
    with RawClient(sidecar) as present:
        present.attach()
        other = connect(engine_uuid=b"p" * 16, chunk_bytes=200_000)
        wait_until(lambda: "stop those engines, or give this one a sidecar" in other.detached_reason)
    session = attached(other)
    assert session.slots.shape[1] == 200_704
    usable(sidecar)
    store(session, 1)
    assert sidecar.stats()["geometry"] == {"slot_bytes": 200_704, "num_columns": 1}


def test_a_chunk_larger_than_the_arena_is_refused_and_the_sidecar_lives(sidecar, connect):
    client = connect(chunk_bytes=1 << 30)
    wait_until(lambda: "arena" in client.detached_reason)
    client.close()
    attached(connect())


def test_the_client_says_what_to_upgrade_and_does_not_hammer(sidecar, caplog, monkeypatch):
    monkeypatch.setattr(service, "PROTOCOL_VERSION", 2)
    client = SidecarClient(sidecar.socket_path, make_hello())
    client.start()
    wait_until(lambda: "upgrade the sidecar" in client.detached_reason)
    time.sleep(0.5)  # several of the ordinary pauses
    assert sidecar.get("/metrics").count("Attach") > 0
    assert 'lmcache_requests_total{code="FAILED_PRECONDITION",method="Attach"} 1.0' in sidecar.get("/metrics")
    client.close()
    assert len([record for record in caplog.records if "upgrade" in record.getMessage()]) == 1


# ---- life of the process ----


@pytest.mark.redis
def test_sigterm_writes_through_what_is_queued():
    with RedisServer() as redis_server, SidecarProcess(remote_url=redis_server.unix_url) as sidecar:
        client = SidecarClient(sidecar.socket_path, make_hello())
        client.start()
        session = attached(client)
        usable(sidecar)
        redis_server.freeze()
        store(session, *range(20))
        sidecar.wait_until(lambda stats: not stats["remote"]["is_reachable"])
        redis_server.thaw()
        assert sidecar.terminate() == 0
        with redis_server.client as redis:
            assert redis.dbsize() == 20
        client.close()

        sidecar.arena_path.unlink()
        sidecar.start()
        client = SidecarClient(sidecar.socket_path, make_hello())
        client.start()
        session = attached(client)
        usable(sidecar)
        wait_until(lambda: session.lookup("r", [(0, make_keys(*range(20)))]).num_leased == 20)
        assert_stored(load(session, session, "r", *range(20)), *range(20))
        client.close()


@pytest.mark.redis
def test_what_the_grace_period_does_not_suffice_for_is_logged():
    with (
        RedisServer() as redis_server,
        SidecarProcess(remote_url=redis_server.unix_url, drain_grace_seconds=0.3) as sidecar,
    ):
        client = SidecarClient(sidecar.socket_path, make_hello())
        client.start()
        session = attached(client)
        usable(sidecar)
        redis_server.kill()
        store(session, *range(5))
        assert sidecar.terminate() == 0
        assert re.search("[45] rows were not written through within the grace period", sidecar.log)
        client.close()


@pytest.mark.redis
def test_keys_that_mean_nothing_elsewhere_stay_here():
    with RedisServer() as redis_server, SidecarProcess(remote_url=redis_server.unix_url) as sidecar:
        client = SidecarClient(sidecar.socket_path, make_hello(private_reason="random hash seed"))
        client.start()
        session = attached(client)
        usable(sidecar)
        store(session, 1, 2)
        assert sidecar.stats()["clients"][0]["private_reason"] == "random hash seed"
        client.close()
        assert sidecar.terminate() == 0
        with redis_server.client as redis:
            assert redis.dbsize() == 0


def test_an_unreachable_remote_tier_is_no_mistake():
    with SidecarProcess(remote_url="redis://127.0.0.1:1") as sidecar:
        assert sidecar.get("/readyz") == "ready\n"
        client = SidecarClient(sidecar.socket_path, make_hello())
        client.start()
        session = attached(client)
        usable(sidecar)
        store(session, 1)
        sidecar.wait_until(lambda stats: not stats["remote"]["is_reachable"])
        assert session.lookup("r", [(0, make_keys(1))]).num_leased == 1
        client.close()


def test_pages(sidecar, connect):
    attached(connect())
    usable(sidecar)
    assert sidecar.get("/healthz") == "ok\n"
    assert sidecar.get("/readyz") == "ready\n"
    metrics = sidecar.get("/metrics")
    for name in re.findall(r"^# TYPE (\S+) counter", metrics, re.MULTILINE):
        assert name.endswith("_total")
    assert "lmcache_memory_tier_capacity_bytes 6.6" in metrics
    assert 'lmcache_clients{state="attached"} 1.0' in metrics
    for family in FAMILIES:  # a path that leads nowhere would read as 0 for ever
        found = sidecar.stats()
        for key in family.path.split("."):
            assert found is None or key in found
            found = found and found[key]
    assert sidecar.stats()["clients"][0]["copier_reason"] == "the engine copies: its KV is in host memory"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        sidecar.get("/nothing")


def test_the_socket_is_for_the_group_only(sidecar):
    assert os.stat(sidecar.socket_path).st_mode & 0o777 == 0o660
    assert (sidecar.folder / "clients").stat().st_mode & 0o777 == 0o770


def run_to_the_end(**options) -> subprocess.CompletedProcess[str]:
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return subprocess.run(
        [sys.executable, "-m", "lmcache_sidecar", "serve", "--http-port", "0", *flags],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'sidecar'}"},
    )


def test_two_sidecars_can_not_share_a_socket_or_an_arena(sidecar):
    same_socket = run_to_the_end(socket=sidecar.socket_path)
    assert same_socket.returncode == 2
    assert "is in use by a live sidecar" in same_socket.stderr
    same_arena = run_to_the_end(socket=sidecar.folder / "other.sock", arena=sidecar.arena_path)
    assert same_arena.returncode == 2
    assert "in use by another sidecar" in same_arena.stderr
    assert sidecar.get("/readyz") == "ready\n"


def test_the_socket_of_a_dead_sidecar_is_replaced(sidecar, connect):
    sidecar.kill()
    assert os.path.exists(sidecar.socket_path)
    sidecar.start()
    attached(connect())


def test_what_can_not_be_used_is_one_line_and_exit_status_2(tmp_path):
    cases = {
        "is not a directory": {"socket": tmp_path / "missing" / "s.sock"},
        r"--arena: .*missing is not a directory": {
            "socket": tmp_path / "s.sock",
            "arena": tmp_path / "missing" / "a",
        },
        r"needs \d+|need": {"socket": tmp_path / "s.sock", "memory_size": "900Ti"},
        "at most 107": {"socket": "/tmp/" + "s" * 120},
    }
    for sentence, options in cases.items():
        result = run_to_the_end(**options)
        assert result.returncode == 2, result.stderr
        lines = [line for line in result.stderr.splitlines() if line.startswith("lmcache-sidecar: error: ")]
        assert len(lines) == 1
        assert re.search(sentence, lines[0]), lines[0]


def test_a_file_that_is_no_socket_is_not_removed(tmp_path):
    (tmp_path / "s.sock").write_text("precious")
    result = run_to_the_end(socket=tmp_path / "s.sock")
    assert result.returncode == 2
    assert "is in the way and no socket" in result.stderr
    assert (tmp_path / "s.sock").read_text() == "precious"


def test_sigint_ends_it_too(sidecar):
    os.kill(sidecar.pid, signal.SIGINT)
    assert sidecar._process.wait(20) == 0
    sidecar._process = None
    assert not socket_answers(sidecar.socket_path)


def socket_answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def test_errors_are_one_family():
    for error in (SidecarUnavailable, StaleSession):
        assert issubclass(error, SidecarError)
