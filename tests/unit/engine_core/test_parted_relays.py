"""Calls to the other parts of an engine, in the messages of its steps."""

import pickle
import threading
from collections import Counter

import numpy as np
import pytest

from lmcache_client.core import parted_lookups
from lmcache_client.core.jobs import GroupStore, LoadJob, Offer, StepMeta, StoreJob, WorkerReport
from lmcache_client.core.lookups import LookupThread
from lmcache_client.core.parts import (
    End,
    Hint,
    Lease,
    PartedStep,
)
from lmcache_store import keys
from lmcache_store.kv_groups import KVGroup
from lmcache_store.tiers.memory.contracts import Found
from tests.harness.client.parted_rig import PartedRig, known
from tests.harness.client.scheduler_rig import (
    GRID,
    IDENTITY,
    Rig,
    blocks,
    hashes,
    make_request,
)
from tests.harness.sidecar.wire import NAMESPACE


@pytest.fixture
def rig():
    rig = PartedRig()
    yield rig
    rig.scheduler.go_offline()


def arrived(rig, request_id="r", **fields):
    request = rig.arrive(make_request(200, request_id, **fields))
    rig.turn()
    return request


def end_finished(rig):
    rig.finish(arrived(rig))


def end_computing(rig):
    rig.begin(arrived(rig, block_hashes=hashes(200, "q")))


def end_offline(rig):
    arrived(rig)
    rig.scheduler.go_offline()


def end_forgotten(rig):
    arrived(rig)
    rig.scheduler.forget(lambda _: True)


def end_offline_while_loading(rig):
    rig.begin(arrived(rig))
    rig.scheduler.go_offline()


def end_loaded(rig):
    rig.begin(arrived(rig))
    rig.turn()
    rig.output(received=["r"])


def end_loaded_at_once(rig):
    rig.begin(arrived(rig))
    rig.output(received=["r"])


def end_aborted(rig):
    request = arrived(rig)
    rig.begin(request)
    rig.turn()
    rig.finish(request)
    assert rig.calls()[-1] == (Lease, "r"), "the load still runs"
    rig.output(received=["r"])


def end_failed(rig):
    request = arrived(rig)
    rig.begin(request)
    rig.turn()
    rig.output(failed_loads={"r"}, received=["r"])
    rig.begin(request)
    rig.finish(request)


def end_preempted(rig):
    request = arrived(rig)
    rig.begin(request)
    rig.turn()
    rig.output(received=["r"])
    rig.step(new=[("r", blocks(7), 192, 8)])
    rig.step(preempted=["r"])
    assert rig.match(request) == (192, True)
    rig.finish(request)


ENDS = {
    "finished while it waits": (end_finished, [Hint, End]),
    "computed": (end_computing, [Hint, End]),
    "offline": (end_offline, [Hint, End]),
    "forgotten": (end_forgotten, [Hint, End]),
    "offline while it loads": (end_offline_while_loading, [Hint, Lease, End]),
    "loaded": (end_loaded, [Hint, Lease, End]),
    "loaded before the lease": (end_loaded_at_once, [Hint, Lease, End]),
    "aborted while it loads": (end_aborted, [Hint, Lease, End]),
    "failed": (end_failed, [Hint, Lease, End]),
    "preempted": (end_preempted, [Hint, Lease, End]),
}


@pytest.mark.parametrize(("run", "calls"), ENDS.values(), ids=ENDS)
def test_each_request_ends_its_calls_once(rig, run, calls):
    known(rig)
    run(rig)
    for _ in range(3):
        rig.step()
    assert rig.calls() == [(call, "r") for call in calls]
    assert not rig.lookups._requests
    assert not rig.lookups._hinted


def test_request_that_ends_before_its_hint_makes_no_calls(rig):
    for end in (rig.finish, lambda request: rig.scheduler.forget(lambda _: True), rig.begin):
        end(rig.arrive(make_request(200)))
        assert type(rig.step()) is StepMeta


def test_chunks_that_the_engine_has_itself_are_marked_as_used(rig):
    known(rig)
    request = rig.arrive(make_request(200))
    assert rig.begin(request, computed=192) == 0
    rig.step(new=[("r", blocks(7), 192, 8)])
    assert rig.calls() == [(Hint, "r"), (End, "r")]
    rig.finish(request)
    rig.step()
    assert len(rig.calls()) == 2


def test_requests_that_wait_are_relayed_before_marks_of_use(rig, monkeypatch):
    known(rig)
    monkeypatch.setattr(parted_lookups, "MAX_RELAY_BYTES", 1)
    rig.begin(rig.arrive(make_request(200, "used")), computed=192)
    rig.arrive(make_request(200, "waiting"))
    for _ in range(6):
        rig.turn()
    assert list(dict.fromkeys(relay.request_id for relay in rig.relays)) == ["waiting", "used"]


def test_requests_without_chunks_to_read_make_no_calls(rig):
    rig.extra_keys["broken"] = None
    rig.arrive(make_request(20, "short"))
    rig.arrive(make_request(200, "writer", skip_reading_prefix_cache=True))
    rig.arrive(make_request(200, "uncached", lora_request="unknown adapter"))
    for _ in range(2):
        assert rig.step() is rig.step()


def test_hint_waits_for_the_keys_of_its_request_only(rig):
    is_open = threading.Event()

    def find_slowly():
        assert is_open.wait(60)
        return ()

    rig.scheduler._extra_keys_of = lambda request, _: find_slowly if request.lora_request else None
    rig.scheduler.on_new_request(make_request(200, "first", lora_request="slow"))
    rig.scheduler.on_new_request(make_request(200, "second"))
    assert [relay.request_id for relay in rig.step().relays] == ["second"]
    is_open.set()
    rig.drain_lookups()
    assert [relay.request_id for relay in rig.step().relays] == ["first"]


def test_lease_and_load_are_in_one_message(rig):
    known(rig)
    rig.begin(rig.arrive(make_request(200)))
    meta = rig.step()
    assert [type(relay) for relay in meta.relays] == [Hint, Lease]
    assert meta.relays[1] == Lease("r", 3)
    assert [load.request_id for load in meta.loads] == ["r"]
    assert type(meta) is PartedStep


def test_hint_has_the_tenant_by_the_hash_of_its_salt(rig):
    rig.arrive(make_request(200, cache_salt="secret"))
    (hint,) = rig.step().relays
    assert hint.salt_hash == keys.salt_hash("secret")
    assert b"secret" not in pickle.dumps(hint)
    rig.begin(rig.scheduler._states["r"].request)
    meta = rig.step(new=[("r", blocks(7), 0, 200)])
    assert meta.salts == {keys.tenant("secret", NAMESPACE): keys.salt_hash("secret")}
    assert meta.stores[0].tenant in meta.salts


def test_salts_are_bounded(monkeypatch):
    monkeypatch.setattr(parted_lookups, "_MAX_TENANTS", 2)
    rig = PartedRig()
    for salt in ("a", "b", "a", "c"):
        rig.arrive(make_request(200, salt, cache_salt=salt))
    assert set(rig.lookups._salts) == {keys.tenant(salt, NAMESPACE) for salt in ("a", "c")}
    rig.scheduler.go_offline()


@pytest.mark.parametrize("num_groups", [1, 6])
def test_relays_of_a_long_prompt_fit_into_64_kib_a_step(num_groups):
    groups = [KVGroup(number, 32, 4096) for number in range(num_groups)]
    rig = PartedRig(*groups, num_parts=3)
    names = hashes(1 << 17)  # 128 k tokens
    for number in range(3):
        rig.arrive(make_request((1 << 17) + 8, f"request-{number}", block_hashes=names))
    hints = []
    while relays := getattr(rig.step(), "relays", []):
        assert len(pickle.dumps(relays)) <= 64 << 10
        hints += relays
    for number in range(3):
        parts = [hint for hint in hints if hint.request_id == f"request-{number}"]
        for group in range(num_groups):
            joined = b"".join(hint.chunk_keys[group] for hint in parts)
            chunk_hashes = GRID.chunk_hashes(names, 0, 1 << 11)
            assert joined == b"".join(keys.chunk_keys(chunk_hashes, group=group))
    rig.scheduler.go_offline()


def test_many_calls_fit_into_64_kib_a_step(rig):
    requests = [
        rig.arrive(make_request(64 * 33, f"{number:060}", cache_salt=f"salt {number}"))
        for number in range(500)
    ]
    rig.scheduler.note_change("x" * 200)
    for call in (Hint, End):
        ids = set()
        while relays := getattr(rig.step(), "relays", []):
            assert len(pickle.dumps(relays)) <= 64 << 10
            assert {type(relay) for relay in relays} == {call}
            ids |= {relay.request_id for relay in relays}
        assert len(ids) == len(requests)
        for request in requests:
            rig.finish(request)


def test_request_whose_id_is_too_long_is_not_relayed(rig):
    """Clients may choose ids, and the sidecars refuse long ones. Such hints would delay those of others."""
    known(rig)
    ids = "i" * 256, "i" * 257, "i" * (64 << 10)
    requests = [rig.arrive(make_request(200, request_id)) for request_id in ids]
    assert [hint.request_id for hint in rig.turn().relays] == ["i" * 256]
    assert [rig.begin(request) for request in requests] == [192] * 3, "its chunks are known"
    assert [relay.request_id for relay in rig.turn().relays] == ["i" * 256]


def test_long_hint_is_answered_as_a_whole(rig, monkeypatch):
    """Answers to its first pieces say nothing of the rest."""
    monkeypatch.setattr(parted_lookups, "MAX_RELAY_BYTES", 1)
    rig.stored(3)
    rig.have(3)
    request = rig.arrive(make_request(200))
    for _ in range(3):
        assert rig.match(request) == (None, False)
        rig.turn()
    assert rig.match(request) == (192, True)
    assert [relay.first_chunk for relay in rig.relays] == [0, 1, 2]


def messages():
    """Messages of an engine of one part, by name."""
    rows = Found(np.arange(2, dtype=np.int64), np.ones(2, np.uint64))
    load = LoadJob.from_offer("r", GRID, Offer(0, 128, (rows,)), 128, ([5, 6, 7, 8],))
    store = StoreJob(7, "r", (GroupStore(0, 0, b"k" * 128, (1, 2, 3, 4)),), b"t" * 32)
    return {
        "idle step": StepMeta(is_idle=True),
        "step": StepMeta([load], [store], {1}, ["h"], False, 9, {2}),
        "load": load,
        "report": WorkerReport(Counter({1: 2}), {"r"}, 3),
        "first report": WorkerReport(identity=IDENTITY),
        "identity": IDENTITY,
    }


def test_messages_of_one_part_have_their_former_sizes():
    """The sizes are those of the commit before engines of several parts."""
    sizes = {name: len(pickle.dumps(message, 5)) for name, message in messages().items()}
    assert sizes == {
        "idle step": 146,
        "step": 796,
        "load": 402,
        "report": 166,
        "first report": 748,
        "identity": 631,
    }


def test_engine_of_one_part_sends_the_messages_of_one_part():
    rig = Rig()
    rig.loading()
    rig.arrive(make_request(200, "other", block_hashes=hashes(200, "q"), cache_salt="salt"))
    rig.begin(rig.scheduler._states["other"].request)
    meta = rig.step(new=[("other", blocks(7), 0, 200)])
    assert type(rig.lookups) is LookupThread
    assert type(meta) is StepMeta
    assert meta.stores
    assert rig.step() is rig.step(), "most steps have the same empty message"
    rig.scheduler.go_offline()
