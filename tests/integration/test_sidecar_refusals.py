"""Calls that a real sidecar refuses with a status and a sentence. A refused call changes nothing."""

import itertools
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_client.rpc import service
from lmcache_client.rpc.client import SidecarClient
from lmcache_client.rpc.hello import Role, TransferOffer
from lmcache_client.rpc.service import (
    ABORT,
    APPLY_HINTS,
    COMMIT,
    LOOKUP,
    RELEASE,
    RESERVE,
    SHARE_MARKS,
    pack_slots,
)
from lmcache_store.kv_groups import GroupKind, KVGroup
from lmcache_store.tiers.memory.kernel_pages import reason_not_pinnable
from testing.child_process import REPOSITORY, wait_until
from testing.cuda import GPU
from testing.processes import SidecarProcess
from tests.harness.engine import store
from tests.harness.sidecar.wire import RawClient, attached, make_hello, make_keys, usable
from tools.cache import cache_root

ONE_GROUP = [pb.GroupKeys(group=0, keys=make_keys(1))]
ASKED = {"request_id": "r", "groups": ONE_GROUP}
INVALID, PRECONDITION = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION
_, WINDOW, CHUNKED, STATE = GroupKind


def keys_of_group(keys: bytes, group: int = 0) -> Mapping[str, object]:
    return ASKED | {"groups": [pb.GroupKeys(group=group, keys=keys)]}


BAD_CALLS = [
    (LOOKUP, {"request_id": ""}, INVALID, "request_id must not be empty"),
    (LOOKUP, {"request_id": "r" * 257}, INVALID, "request_id has 257 bytes, at most 256"),
    (LOOKUP, {"request_id": "r"}, INVALID, r"groups must contain each of \[0\] once"),
    (LOOKUP, ASKED | {"groups": ONE_GROUP * 2}, INVALID, "groups must contain each of"),
    (LOOKUP, keys_of_group(b"", group=7), INVALID, "groups must contain each of"),
    (LOOKUP, keys_of_group(b"k" * 33), INVALID, "33 bytes are not a multiple"),
    (LOOKUP, keys_of_group(b"k" * 4097 * 64), INVALID, f"at most {service.MAX_KEYS_PER_LOOKUP} keys"),
    (LOOKUP, ASKED | {"tenant": b"t" * 513}, INVALID, "tenant has 513 bytes"),
    (LOOKUP, ASKED | {"prefill_tokens_per_second": float("nan")}, INVALID, "must be a finite number"),
    *(
        (LOOKUP, ASKED | {"scheduled": pb.Scheduled(first_blocks=b"x" * size)}, INVALID, "first_blocks")
        for size in (7, 8 * 64)
    ),
    (LOOKUP, ASKED | {"epoch": 1}, PRECONDITION, "epoch 1 is over.*attach again"),
    (LOOKUP, {"client_uuid": b"x" * 16}, PRECONDITION, "not attached: attach again"),
    (LOOKUP, {"client_uuid": b""}, PRECONDITION, "not attached: attach again"),
    (RESERVE, {"keys": make_keys(9), "tenant": b"t" * 513}, INVALID, "tenant has 513 bytes"),
    (RESERVE, {"group": 7, "keys": make_keys(9)}, INVALID, "group 7 is unknown"),
    (RESERVE, {"keys": b"k" * 31}, INVALID, "31 bytes are not a multiple"),
    (RESERVE, {"keys": make_keys(9), "epoch": 0}, PRECONDITION, "attach again"),
    (RESERVE, {"keys": make_keys(9), "request_id": "r" * 257}, INVALID, "request_id has 257 bytes"),
    (RESERVE, {"keys": bytes(service.MAX_MESSAGE_BYTES)}, grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than"),
    (COMMIT, {"slots": bytes(17)}, INVALID, "slots must have 16 bytes each, 17 bytes"),
    (COMMIT, {"slots": pack_slots([(4_000_000_000, 1)])}, INVALID, "4000000000 is out of range: the arena"),
    (COMMIT, {"slots": pack_slots([(0, 1), (0, 1)])}, INVALID, "slots must be of different rows"),
    (COMMIT, {"slots": pack_slots([(0, 1)] * 257)}, INVALID, "at most 256"),
    (COMMIT, {"slots": pack_slots([(5, 1)])}, PRECONDITION, "nothing was committed"),
    (COMMIT, {"slots": pack_slots([(0, 999)])}, PRECONDITION, "nothing was committed"),
    (ABORT, {"slots": pack_slots([(0, 1), (5, 1)])}, PRECONDITION, "nothing was aborted"),
    (ABORT, {"slots": pack_slots([((1 << 64) - 1, 1)])}, INVALID, "out of range"),
    (RELEASE, {"request_ids": ["held", ""]}, INVALID, "request_id must not be empty"),
    (RELEASE, {"request_ids": ["held"], "epoch": 3}, PRECONDITION, "attach again"),
    (SHARE_MARKS, {"marks": bytes(12)}, INVALID, "marks must have 8 bytes each, 12 bytes"),
    (SHARE_MARKS, {"marks": bytes(8 * 32_769)}, INVALID, "marks has 262152 bytes, at most 262144"),
    (SHARE_MARKS, {"marks": bytes(8), "epoch": 1}, PRECONDITION, "epoch 1 is over.*attach again"),
    (SHARE_MARKS, {"marks": bytes(8), "client_uuid": b"x" * 16}, PRECONDITION, "not attached: attach again"),
    (APPLY_HINTS, {"request_id": "r"}, INVALID, r"groups must contain each of \[0\] once"),
    (APPLY_HINTS, ASKED | {"epoch": 1}, PRECONDITION, "epoch 1 is over.*attach again"),
    (APPLY_HINTS, ASKED | {"message_id": "m" * 513}, INVALID, "message_id has 513 bytes"),
    (APPLY_HINTS, ASKED | {"actions": [pb.HintAction(kind=pb.RELEASE)] * 34}, INVALID, "at most 32 actions"),
    (APPLY_HINTS, ASKED | {"refusals": [pb.HintDecision(reason="r" * 513)]}, INVALID, "reason has 513 bytes"),
    *(
        (APPLY_HINTS, ASKED | {"actions": [pb.HintAction(**action)]}, INVALID, message)
        for action, message in (
            ({}, "kind must be RETAIN, PREFETCH or RELEASE"),
            ({"kind": pb.RETAIN}, "ttl_seconds must be a finite number above 0"),
            ({"kind": pb.RETAIN, "ttl_seconds": float("nan")}, "ttl_seconds must be a finite number"),
            ({"kind": pb.RETAIN, "ttl_seconds": 1, "priority": 101}, "priority must be from -100 to 100"),
            ({"kind": pb.RELEASE, "action_id": "a" * 513}, "action_id has 513 bytes"),
        )
    ),
]
UPGRADE = f"speaks protocol %d, sidecar .* speaks {service.PROTOCOL_VERSION}: upgrade "
BAD_HELLOS = [
    ({"protocol_version": 0}, PRECONDITION, f"{UPGRADE % 0}the engine's LMCache"),
    ({"protocol_version": 9}, PRECONDITION, f"{UPGRADE % 9}the sidecar"),
    ({"client_uuid": b"short"}, INVALID, "client_uuid must have 16 bytes, it has 5"),
    ({"client_uuid": b"\0" * 16}, PRECONDITION, "lock file can't be opened"),
    ({"engine_uuid": b""}, INVALID, "engine_uuid must have 16 bytes"),
    ({"namespace": b"n" * 31}, INVALID, "namespace must have 32 bytes, it has 31"),
    ({"role": 0}, INVALID, "role must be"),
    ({"role": 9}, INVALID, "role must be"),
    ({"column": 1}, INVALID, "column 1 is not below num_columns, 1"),
    ({"model": "m" * 513}, INVALID, "model has 513 bytes"),
    ({"namespace": b"m" * 32}, PRECONDITION, "another client of this engine_uuid"),
    ({"numa_nodes": [0, 1]}, INVALID, "numa_nodes must name none or 1 nodes"),
    ({"geometry": pb.Geometry()}, INVALID, "num_columns must be 1 to"),
    ({"num_parts": 1025}, INVALID, "num_parts must be at most 1024"),
    ({"geometry": pb.Geometry(num_columns=1)}, INVALID, "1 to 64 groups"),
]
UNKNOWN_KIND = SimpleNamespace(value=99)
BAD_GROUPS = [
    ([(0, 16, 4096, 0, WINDOW)], INVALID, "window_tokens of group 0, SLIDING_WINDOW, must be given"),
    ([(0, 16, 4096, 0, CHUNKED)], INVALID, "window_tokens of group 0, CHUNKED_ATTENTION, must be given"),
    ([(0, 16, 4096, 512)], INVALID, "window_tokens of group 0, FULL_ATTENTION, must not be given"),
    ([(0, 16, 4096, 512, STATE)], INVALID, "window_tokens of group 0, STATE, must not be given"),
    ([(0, 16, 0, 512, WINDOW)], INVALID, "chunk_bytes of group 0 is out of range"),
    ([(0, 16, 1, 1, WINDOW)], INVALID, "chunk_bytes of group 0 is out of range"),
    ([(0, 16, 4096, 64, CHUNKED)], INVALID, "chunk_bytes of group 0 is out of range"),
    ([(0, 16, 0, 64, CHUNKED)], INVALID, "at least one group must store KV"),
    ([(0, 16, 4096, 512, WINDOW)], PRECONDITION, "another client of this engine_uuid"),
    ([(0, 24, 4096)], INVALID, "256, must be a multiple of the block_tokens of group 0, 24"),
    ([(0, 0, 4096)], INVALID, "must be a multiple"),
    ([(0, 16, 0)], INVALID, "chunk_bytes of group 0 is out of range"),
    ([(0, 16, 1 << 50)], INVALID, "chunk_bytes of group 0 is out of range"),
    ([(0, 16, 8192)], PRECONDITION, "another client of this engine_uuid"),
    ([(0, 16, 4096), (0, 16, 4096)], INVALID, "every group must have a different number"),
    ([(number, 16, 4096) for number in range(1000)], INVALID, "1 to 64 groups, not 1000"),
    ([(0, 16, 4096, 0, UNKNOWN_KIND)], INVALID, "group 0 must have a known kind"),
]


@pytest.fixture(scope="module")
def busy_client():
    """A client with one reserved and one leased row, so that a refused call could change something."""
    with SidecarProcess() as process, RawClient(process) as client:
        client.attach()
        usable(process)
        stored = client.call(RESERVE, group=0, keys=make_keys(1))
        client.call(COMMIT, slots=stored.slots)
        process.settled()
        client.call(RESERVE, group=0, keys=make_keys(2))
        client.call(LOOKUP, request_id="held", groups=ONE_GROUP)
        yield client


def state_of(sidecar: SidecarProcess) -> dict[str, object]:
    """Statistics without the time, and without the background work and detached clients of earlier tests.

    The sidecar may still have to notice that a client of the test before has left.
    """
    stats = sidecar.wait_until(lambda stats: stats if stats["num_clients"]["attached"] == 1 else None)
    del stats["pending_work"]
    del stats["time"], stats["uptime_seconds"], stats["num_clients"], stats["benefit"]["tier_byte_seconds"]
    stats["clients"] = [client for client in stats["clients"] if client["is_attached"]]
    return stats


@pytest.mark.parametrize(("method", "fields", "code", "sentence"), BAD_CALLS)
def test_invalid_call_is_refused_with_a_sentence(busy_client, method, fields, code, sentence):
    state_before = state_of(busy_client.sidecar)
    with pytest.raises(grpc.RpcError) as caught:
        busy_client.call(method, **fields)
    assert caught.value.code() is code
    assert re.search(sentence, caught.value.details())
    attach_again = service.reason_of(caught.value) == service.REASON_ATTACH_AGAIN
    assert attach_again == ("attach again" in sentence)
    assert state_of(busy_client.sidecar) == state_before


def test_store_calls_of_a_scheduler_are_refused(busy_client):
    with RawClient(busy_client.sidecar, make_hello(Role.SCHEDULER)) as scheduler:
        scheduler.attach()
        for method in (RESERVE, COMMIT, ABORT):
            with pytest.raises(grpc.RpcError, match="only a worker can store"):
                scheduler.call(method)


def check_hello_is_refused(client: RawClient, code: grpc.StatusCode, sentence: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        client.attach()
    assert caught.value.code() is code
    assert re.search(sentence, caught.value.details()), caught.value.details()


@pytest.mark.parametrize(("change", "code", "sentence"), BAD_HELLOS)
def test_invalid_hello_is_refused(busy_client, change, code, sentence):
    state_before = state_of(busy_client.sidecar)
    with RawClient(busy_client.sidecar) as client:
        for name in change:
            client.hello.ClearField(name)
        client.hello.MergeFrom(pb.Hello(**change))
        check_hello_is_refused(client, code, sentence)
    assert state_of(busy_client.sidecar) == state_before


@pytest.mark.parametrize(("groups", "code", "sentence"), BAD_GROUPS)
def test_invalid_groups_are_refused(busy_client, groups, code, sentence):
    groups = tuple(itertools.starmap(KVGroup, groups))
    with RawClient(busy_client.sidecar, make_hello(groups=groups)) as client:
        check_hello_is_refused(client, code, sentence)


@pytest.mark.parametrize(
    "groups",
    [[(number, 16, (1 << 40) // (number + 1)) for number in range(64)], [(0, 16, 1 << 30)]],
    ids=["64 sizes to pack, of up to 1 TiB", "one"],
)
def test_groups_larger_than_the_arena_are_refused_at_once(sidecar, connect, groups):
    groups = tuple(itertools.starmap(KVGroup, groups))
    with RawClient(sidecar, make_hello(groups=groups)) as client:
        check_hello_is_refused(client, PRECONDITION, "the arena can't be formatted")
    attached(connect())


def test_lookup_must_contain_all_groups(sidecar):
    groups = (KVGroup(0, 16, 4096), KVGroup(2, 16, 4096, 64, WINDOW), KVGroup(5, 16, 0, 64, CHUNKED))
    with RawClient(sidecar, make_hello(groups=groups)) as client:
        client.attach()
        for num_keys, sentence in (
            (((0, 2),), r"each of \[0, 2\] once, they are \[0\]"),
            (((0, 2), (2, 2), (5, 2)), r"each of \[0, 2\] once"),
            (((0, 2), (2, 1)), "the same number of keys"),
        ):
            parts = [pb.GroupKeys(group=group, keys=make_keys(*range(number))) for group, number in num_keys]
            with pytest.raises(grpc.RpcError, match=sentence):
                client.call(LOOKUP, request_id="r", groups=parts)
        with pytest.raises(
            grpc.RpcError, match=r"group 5 is unknown or stores no KV: the groups that do are \[0, 2\]"
        ):
            client.call(RESERVE, group=5, keys=make_keys(1))


@pytest.mark.parametrize(
    "messages",
    [
        [pb.AttachRequest()],
        [pb.AttachRequest(drained=pb.Drained(epoch=1))],
        ["hello", "hello"],
        ["hello", pb.AttachRequest(pinned=pb.Pinned(problem="x" * 513))],
        ["hello", pb.AttachRequest(drained=pb.Drained(epoch=1))],
    ],
)
def test_stream_that_violates_the_protocol_is_ended(busy_client, messages):
    with RawClient(busy_client.sidecar) as client:
        hello = pb.AttachRequest(hello=client.hello)
        with pytest.raises(grpc.RpcError) as caught:
            list(client.open(*(hello if message == "hello" else message for message in messages)))
    assert caught.value.code() in (INVALID, PRECONDITION)


def test_hello_without_the_lock_is_refused(busy_client):
    with RawClient(busy_client.sidecar) as client:
        path = client.lock._path
        client.lock.release()
        path.touch()
        with pytest.raises(grpc.RpcError, match="no other process holds the record lock"):
            client.attach()
        path.unlink()


def test_engine_with_another_geometry_waits_until_the_last_engine_leaves(sidecar, connect):
    with RawClient(sidecar, make_hello(model="first")) as present:
        present.attach()
        second = connect(engine_uuid=b"p" * 16, chunk_bytes=200_000, model="other")
        remedy = "stop those engines, or give this engine a separate sidecar"
        wait_until(lambda: remedy in second.detached_reason)
        assert remedy in sidecar.stats()["attach_refusal"]
        before = num_refused(sidecar, "FAILED_PRECONDITION")
        wait_until(lambda: num_refused(sidecar, "FAILED_PRECONDITION") > before, what="it tries again")
        refused = (
            rf"WARNING .*: Refused a client: pid {os.getpid()}, model 'other': the arena has the .*'first'"
        )
        assert len(re.findall(refused, sidecar.log)) == 1
    session = attached(second)
    assert session.slots.shape[1] == 200_704
    usable(sidecar)
    store(session, 1)
    assert sidecar.stats()["geometry"] == {"slot_bytes": 200_704, "num_columns": 1, "slots_per_frame": 1}


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to another user")


@needs_root
def test_directory_of_another_user_is_refused_by_sidecar_and_engine(sidecar, connect):
    os.chown(sidecar.folder, 65534, -1)
    client = connect()
    wait_until(lambda: "belongs to user 65534" in client.detached_reason)
    assert "install -d -m 700" in client.detached_reason
    for option in ("socket", "arena"):
        with SidecarProcess(stay_up="true", **{option: sidecar.folder / "other"}) as refused:
            assert (
                f"--{option}: {sidecar.folder} belongs to user 65534" in refused.stats()["not_ready_reason"]
            )
    os.chown(sidecar.folder, os.getuid(), -1)
    attached(client)


@needs_root
@pytest.mark.parametrize(
    ("owner", "mode", "problem"),
    [
        (7, 0o700, ""),
        (7, 0o2770, ""),  # the socket itself admits the group
        (7, 0o777, "all users may replace files"),
        (7, 0o1777, ""),
        (0, 0o777, ""),  # an emptyDir
        (0, 0o3777, ""),  # an emptyDir in memory, with fsGroup
        (8, 0o700, "belongs to user 8, and this process is user 7"),
    ],
)
def test_directory_that_others_may_change_is_a_problem(tmp_path, monkeypatch, owner, mode, problem):
    os.chown(tmp_path, owner, -1)
    tmp_path.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: 7)
    reported = service.directory_problem(str(tmp_path))
    assert problem in reported
    assert bool(problem) == bool(reported)


def test_directory_of_all_users_is_a_problem():
    assert "all users share /dev/shm" in service.directory_problem("/dev/shm")


def num_refused(sidecar: SidecarProcess, code: str) -> float:
    """Number of attaches that were refused with this status."""
    series = re.escape(f'lmcache_rpcs_total{{code="{code}",method="Attach"}}')
    match = re.search(rf"^{series} (\S+)$", sidecar.get("/metrics"), re.MULTILINE)
    return float(match[1]) if match else 0.0


def test_client_reports_what_to_upgrade_and_does_not_retry(sidecar, caplog, monkeypatch):
    misconfigured = SidecarClient(sidecar.socket_path, make_hello(engine_uuid=b"e" * 15))
    monkeypatch.setattr(service, "PROTOCOL_VERSION", service.PROTOCOL_VERSION + 1)
    client = SidecarClient(sidecar.socket_path, make_hello())
    client.start()
    wait_until(lambda: "upgrade the sidecar" in client.detached_reason)
    misconfigured.start()  # refused as well, but retried after the normal pauses
    wait_until(lambda: num_refused(sidecar, "INVALID_ARGUMENT") >= 4)
    assert num_refused(sidecar, "FAILED_PRECONDITION") == 1
    client.close()
    misconfigured.close()
    assert len([record for record in caplog.records if "upgrade" in record.getMessage()]) == 1


@pytest.fixture
def disk_arena() -> Iterator[Path]:
    """Path of an arena on a file system that is not in memory."""
    for folder in (cache_root(), Path(tempfile.gettempdir()), REPOSITORY):
        if reason_not_pinnable(folder / "arena"):
            with tempfile.TemporaryDirectory(dir=folder) as path:
                yield Path(path, "arena")
            return
    pytest.skip("all file systems here are in memory")


def test_engine_on_a_gpu_is_refused_if_the_arena_is_not_on_tmpfs(disk_arena, caplog):
    """Linux refuses to pin such an arena. Engines on CPUs use it."""
    with SidecarProcess(arena=disk_arena, memory_size="4Mi") as sidecar:
        on_gpu = SidecarClient(sidecar.socket_path, make_hello(transfer=TransferOffer(GPU, refusal="no IPC")))
        on_gpu.start()
        wait_until(lambda: "is not on tmpfs" in on_gpu.detached_reason)
        assert "an emptyDir with medium: Memory" in on_gpu.detached_reason
        wait_until(lambda: num_refused(sidecar, "FAILED_PRECONDITION") >= 2, what="the client tries again")
        assert len([record for record in caplog.records if "tmpfs" in record.getMessage()]) == 1
        on_cpu = SidecarClient(sidecar.socket_path, make_hello(engine_uuid=b"c" * 16))
        on_cpu.start()
        session = attached(on_cpu)
        usable(sidecar)
        store(session, 1)
        for client in (on_gpu, on_cpu):
            client.close()


def test_cuda_ipc_needs_an_arena_on_tmpfs(disk_arena):
    with SidecarProcess(arena=disk_arena, transfer="CudaIPC", stay_up="true") as sidecar:
        assert re.match(f"--arena: {disk_arena} is not on tmpfs, .*", sidecar.stats()["not_ready_reason"])
        assert not disk_arena.exists()
