"""Workers of an engine of several parts: the names of rows in each part, and the parts' identities."""

import itertools
import pickle
import threading
from dataclasses import replace

import numpy as np
import pytest

from lmcache_client.core.hits import NamedRows
from lmcache_client.core.jobs import GroupLoad, LoadJob, WorkerReport
from lmcache_client.core.parts import (
    Introductions,
    PartedIdentity,
    PartedReport,
    PartedStep,
    part_namespace,
)
from lmcache_client.core.worker import WorkerSide
from lmcache_store import keys
from lmcache_store.kv_groups import KVGroup
from lmcache_store.tiers.memory.contracts import Found, Slot
from tests.harness.client.scheduler_rig import IDENTITY, Rig, blocks, make_request
from tests.harness.client.worker_rig import SALT, TENANT, WorkerRig, parted_identity
from tests.harness.sidecar.wire import NAMESPACE

CHUNKS = b"a".ljust(32) + b"b".ljust(32)


@pytest.fixture
def rig():
    rig = WorkerRig(parted_identity(1))
    yield rig
    rig.finish()


def start_load(
    rig, *places, blocks=(11, 12, 13, 14), chunks=CHUNKS, namespace=NAMESPACE, fails_by_block=True
):
    """Start to load rows of part 0, whose places there are ``places``."""
    rows, generations = zip(*places or [(7, 7), (8, 8)], strict=True)
    named = NamedRows(np.array(rows), np.array(generations, np.uint64), namespace, chunks)
    group = GroupLoad(0, blocks, named, blocks_per_row=2)
    step = PartedStep(loads=[LoadJob("r", (group,), fails_by_block)])
    rig.worker.start_loads(pickle.loads(pickle.dumps(step)))


def load(rig, *places, **fields):
    """Load rows as in ``start_load``. Return the blocks without valid KV."""
    start_load(rig, *places, **fields)
    rig.collect_until(lambda sent, loaded: loaded)
    return rig.worker.take_bad_blocks()


def test_rows_have_the_names_of_the_part(rig):
    rig.store_in_part()
    names = [keys.part_namespace(NAMESPACE, 1) + name.ljust(32) for name in (b"a", b"b")]
    assert list(rig.session.rows) == names
    assert load(rig) == set()
    assert [rig.copier.kv[block] for block in (11, 12, 13, 14)] == [1, 2, 3, 4]


def test_rows_of_part_0_are_loaded_from_their_places():
    rig = WorkerRig(parted_identity(0))
    rig.store_in_part()
    assert list(rig.session.rows) == [b"a".ljust(32), b"b".ljust(32)]
    assert load(rig, *rig.session.committed) == set()
    assert [rig.copier.kv[block] for block in (11, 12, 13, 14)] == [1, 2, 3, 4]
    rig.finish()


def test_load_of_a_row_that_only_another_part_has_fails(rig):
    rig.store_in_part(names=(b"a", b"c"))
    assert load(rig) == {13, 14}
    assert load(rig, chunks=CHUNKS[32:] + CHUNKS[:32]) == {11, 12, 13, 14}
    assert rig.worker.take_report(PartedStep()).failed_loads == {"r"}
    assert load(rig, fails_by_block=False) == set()
    assert rig.worker.take_failed_requests() == {"r"}


def test_places_of_part_0_mean_nothing_in_other_parts(rig):
    rig.store_in_part()
    rows, generations = zip(*rig.session.committed, strict=True)
    unnamed = GroupLoad(0, (11, 12, 13, 14), None, blocks_per_row=2)
    unknown = NamedRows(np.array(rows), np.array(generations), b"o" * 32, CHUNKS)
    for places in (None, Found(unknown.rows, unknown.generations), unknown):
        rig.worker.start_loads(PartedStep(loads=[LoadJob("r", (unnamed._replace(found=places),))]))
        rig.collect_until(lambda sent, loaded: loaded)
        assert rig.worker.take_bad_blocks() == {11, 12, 13, 14}


def test_rank_that_attaches_after_a_step_copies_nothing_of_it(rig):
    """The jobs of the step have names and places of part 0, and no fence."""
    rig.store_in_part()
    num_fences, num_rows, places = len(rig.copier.fences), len(rig.session.rows), rig.session.committed
    rig.worker.close()
    rig.worker = worker = WorkerSide(lambda _: (rig.session, rig.copier, parted_identity(1)))
    is_attached = threading.Event()
    for thread in (worker._loader, worker._storer):
        thread.submit(is_attached.wait, 60)
    worker.start_stores(PartedStep(stores=[rig.job(names=(b"c", b"d"))]))
    start_load(rig, *places)
    worker.register_kv_caches({})
    is_attached.set()
    rig.collect_until(lambda *_: not worker._stores and not worker._loading)
    assert worker.take_bad_blocks() == {11, 12, 13, 14}
    assert (len(rig.copier.fences), len(rig.session.rows)) == (num_fences, num_rows)


def test_part_with_other_weights_shares_no_rows():
    """The namespace of such a part differs from the one that part 0's namespace leads to."""
    stored = []
    for engine in (NAMESPACE, b"o" * 32, b"p" * 32):
        rig = WorkerRig(parted_identity(1, engine=engine))
        rig.store_in_part()
        stored.append({key[:32] for key in rig.session.rows})
        assert load(rig) == set()
        rig.finish()
        if engine != NAMESPACE:
            assert stored[-1] != {part_namespace(engine, 1)}, "the sidecar would share these rows"
    assert len(set.union(*stored)) == 3


def test_reset_begins_a_private_namespace_in_each_part(rig):
    rig.store_in_part()
    rig.session.rows.clear()
    assert load(rig, namespace=b"r" * 32) == {11, 12, 13, 14}
    assert part_namespace(b"r" * 32, 1) != rig.worker.identity.hello.namespace


def test_tenant_has_a_name_of_the_part(rig):
    rig.store_in_part()
    step = PartedStep(salts={TENANT: SALT})
    for tenant in (TENANT, b"", b"unknown"):
        job = rig.job(names=(tenant or b"-",), blocks=(5, 6))
        object.__setattr__(job, "tenant", tenant)
        step.stores.append(job)
    rig.worker.start_stores(step)
    rig.collect_until(lambda *_: not rig.worker._stores)
    expected = {keys.tenant("salt", keys.part_namespace(NAMESPACE, 1)), b"", b"unknown"}
    assert rig.session.tenants == expected


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("fault", ["down", "busy", "none"])
def test_store_without_all_rows_is_reported_as_incomplete(part, fault):
    rig = WorkerRig(parted_identity(part))
    if fault == "busy":
        name = keys.part_namespace(NAMESPACE, 1) + b"a".ljust(32) if part else b"a".ljust(32)
        rig.session.rows[name] = Slot(9, 9)  # another client writes it
    rig.session.is_down = fault == "down"
    rig.store_in_part()
    report = rig.worker.take_report(PartedStep())
    assert report.stores_ended == {1: 1}
    assert getattr(report, "incomplete", set()) == (set() if fault == "none" else {1})
    rig.finish()


def test_rank_that_is_not_attached_reports_its_stores_as_incomplete(rig):
    rig.worker.go_offline()
    rig.store_in_part()
    report = rig.worker.take_report(PartedStep())
    assert isinstance(report, PartedReport)
    assert (report.stores_ended, report.incomplete) == ({1: 1}, {1})


@pytest.mark.parametrize(("part", "is_speaker"), [(0, False), (1, True), (1, False)])
def test_a_rank_of_each_part_introduces_it(part, is_speaker):
    rig = WorkerRig(identity := parted_identity(part, is_speaker=is_speaker))
    report = rig.worker.take_report(PartedStep())
    expected = None if part and not is_speaker else identity
    assert (report.identity if report else None) is expected
    assert rig.worker.identity_to_report is expected
    assert identity.num_ranks == 6
    rig.finish()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_engine_is_known_when_all_parts_are(order, caplog):
    caplog.set_level("INFO")
    identities = [parted_identity(part) for part in order]
    introductions = Introductions()
    assert list(introductions.take(["another connector's message", *identities[:2], None])) == []
    assert "1 of the engine's nodes have not started" in caplog.text
    (engine,) = introductions.take(identities[2:])
    assert isinstance(engine, PartedIdentity)
    assert (engine.part, engine.conflict, engine.identities) == (0, "", ())
    first, second, third = (WorkerReport(identity=identity) for identity in identities)
    for merged in (first.aggregate(second).aggregate(third), first.aggregate(second.aggregate(third))):
        assert list(Introductions().take([pickle.loads(pickle.dumps(merged.identity))])) == [engine]
    assert list(introductions.take(identities)) == [], "both the handshake and reports bring them"
    assert list(Introductions().take([IDENTITY])) == [IDENTITY]


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ({}, {"engine": b"o" * 32}, "node 2 of the engine: it has other weights"),
        ({}, {"engine": b"o" * 32, "private": "no files"}, "node 2 of the engine: no files"),
        ({"engine": b"p" * 32, "private": "no files"}, {}, "node 0 of the engine: no files"),
    ],
)
def test_engine_whose_parts_differ_is_private(first, second, reason, caplog):
    """KV of part 0 depends on the weights of all parts, too."""

    def identity_with(part, private="", **fields):
        identity = parted_identity(part, **fields)
        return replace(identity, hello=replace(identity.hello, private_reason=private))

    messages = [identity_with(0, **first), identity_with(1, **first), identity_with(2, **second)]
    (engine,) = Introductions().take(messages)
    assert reason in engine.conflict
    assert engine.conflict in caplog.text
    rig = Rig(messages[0], introductions=messages)
    rig.arrive(request := make_request(200))
    rig.begin(request)
    meta = rig.schedule(request, 200, (blocks(7),))
    (store,) = meta.stores
    assert store.groups[0].keys[:32] not in {message.hello.namespace for message in messages}
    assert rig.lookups.private_reason == engine.conflict, "hints carry it to the other parts"
    rig.scheduler.go_offline()


@pytest.mark.parametrize("is_private", [True, False])
@pytest.mark.parametrize(
    ("other", "sizes"),
    [
        ({"chunk_tokens": 128}, "128 tokens and 4096 bytes (KV groups: 1)"),
        ({"groups": (KVGroup(0, 32, 2048),)}, "64 tokens and 2048 bytes (KV groups: 1)"),
        ({"groups": (KVGroup(0, 32, 2048), KVGroup(1, 32, 2048))}, "64 tokens and 4096 bytes (KV groups: 2)"),
    ],
)
def test_engine_whose_parts_have_other_chunks_is_not_cached(is_private, other, sizes, caplog):
    """Copies of each of its steps would fail."""
    messages = [parted_identity(0), parted_identity(1), parted_identity(2)]
    hello = replace(messages[2].hello, namespace=b"p" * 32 if is_private else messages[2].hello.namespace)
    messages[2] = replace(messages[2], hello=replace(hello, **other))
    rig = Rig(messages[0], introductions=messages)
    assert rig.lookups is None
    rig.scheduler.adopt(messages)
    (warning,) = [record.getMessage() for record in caplog.records]
    ending = "but node 0 has chunks of 64 tokens and 4096 bytes (KV groups: 1)."
    assert f"node 2 of the engine has chunks of {sizes}, {ending}" in warning
    assert "such as lmcache.chunk_tokens" in warning
