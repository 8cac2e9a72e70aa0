"""The connector's worker side over a sidecar double, with copies of one byte for each block."""

import pickle
import threading
import time
from typing import Any, cast

import numpy as np

from lmcache_client.core.jobs import GroupLoad, GroupStore, LoadJob, StepMeta, StoreJob
from lmcache_client.core.parts import PartedIdentity, PartedStep, part_namespace
from lmcache_client.core.worker import WorkerSide
from lmcache_store import keys
from lmcache_store.tiers.memory.contracts import Found
from tests.harness.client.scheduler_rig import make_identity
from tests.harness.client.session_double import SessionDouble
from tests.harness.sidecar.wire import NAMESPACE, make_hello

IDENTITY = make_identity()

SALT = keys.salt_hash("salt")
TENANT = keys.tenant_of_hash(SALT, NAMESPACE)
"""Tenant of this salt in part 0."""


def parted_identity(part, engine=NAMESPACE, groups=IDENTITY.hello.groups, **fields):
    """A rank of an engine of three parts. ``engine``: namespace of the engine, as this rank computes it."""
    hello = make_hello(namespace=part_namespace(engine, part), groups=groups, chunk_tokens=64)
    return PartedIdentity(hello, IDENTITY.hash_tokens, part=part, num_parts=3, num_ranks=6, **fields)


def found_rows(*slots):
    rows, generations = zip(*slots, strict=True)
    return Found(np.array(rows), np.array(generations))


class CopierDouble:
    """Copies one byte for each block. ``gate`` holds copies back, ``in_copy`` is set when one has begun."""

    def __init__(self):
        self.kv = {}
        self.row_bytes = {0: 4096}
        self.fences = []
        self.waits = []
        self.gate = threading.Event()
        self.gate.set()
        self.in_copy = threading.Event()
        self.after_copy = lambda: None

    def fence(self):
        return "fence"

    def wait(self, fence):
        self.waits.append(fence)

    def close(self):
        pass

    def store(self, group, slot, blocks, fence):
        self._copy(fence)
        slot[: len(blocks)] = [self.kv[block] for block in blocks]
        self.after_copy()

    def share(self, work):
        work()

    batch_bytes = 0

    def load(self, rows, fence):
        for _, slot, first_block, blocks in rows:
            self._copy(fence)
            self.kv |= dict(zip(blocks, slot[first_block:], strict=False))
            self.after_copy()

    def _copy(self, fence):
        self.fences.append(fence)
        self.in_copy.set()
        assert self.gate.wait(60)


class WorkerRig:
    def __init__(self, identity=IDENTITY, **settings):
        self.now = 0.0
        self.session, self.copier = SessionDouble(), CopierDouble()
        attached = cast(Any, (self.session, self.copier, identity))
        self.worker = WorkerSide(lambda _: attached, lambda: self.now, **settings)
        self.worker.register_kv_caches({})
        self.jobs = 0

    def job(
        self, request_id="r", names=(b"a", b"b"), blocks=(1, 2, 3, 4), *, groups=None, is_transient=False
    ):
        """``groups``: blocks by KV group."""
        self.jobs += 1
        stores = []
        for group, ids in (groups or {0: blocks}).items():
            self.copier.kv |= {block: block for block in ids}
            row_keys = b"".join(
                NAMESPACE + (b"%d %s" % (group, name) if group else name).ljust(32) for name in names
            )
            stores.append(GroupStore(group, 0, row_keys, ids))
        return StoreJob(self.jobs, request_id, tuple(stores), is_transient=is_transient)

    def store(self, **fields):
        self.worker.start_stores(StepMeta(stores=[self.job(**fields)]))

    def store_in_part(self, **fields):
        """Store rows in an engine of several parts, and wait for the end."""
        step = PartedStep(stores=[self.job(**fields)], salts={TENANT: SALT})
        self.worker.start_stores(pickle.loads(pickle.dumps(step)))
        self.collect_until(lambda *_: not self.worker._stores)

    def hold_store(self, **fields):
        """Start a store whose first copy stays in progress until the gate opens."""
        self.copier.gate.clear()
        self.store(**fields)
        assert self.copier.in_copy.wait(60)

    def end_torn_store(self):
        """End a store of two rows whose blocks have got KV of another request: nothing is committed."""
        self.copier.kv |= dict.fromkeys((1, 2, 3, 4), 99)
        self.copier.gate.set()
        self.collect_until(lambda *_: len(self.session.aborted) == 2)
        assert self.session.committed == []

    def stored_bytes(self):
        return [self.session.slots[slot.row][:2].tolist() for slot in self.session.committed]

    def load(self, *slots, blocks=(11, 12, 13, 14), fails_by_block=True):
        size = len(blocks) // len(slots)
        group = GroupLoad(0, blocks, found_rows(*slots), blocks_per_row=size)
        self.worker.start_loads(StepMeta(loads=[LoadJob("r", (group,), fails_by_block)]))

    def reclaim(self, *job_ids):
        self.worker.handle_preemptions(StepMeta(reclaimed=set(job_ids)))

    def collect(self, held, is_idle):
        return self.collect_meta(StepMeta(held=list(held), is_idle=is_idle))

    def collect_meta(self, meta):
        return self.worker.collect(meta)

    def collect_until(self, done, held=()):
        """Step like the engine until ``done(sent, loaded)``. Returns everything that was reported."""
        sent, loaded, deadline = [], [], time.monotonic() + 60
        while not done(sent, loaded):
            if time.monotonic() > deadline:
                raise AssertionError((sent, loaded))
            newly_sent, newly_loaded = self.collect(held, is_idle=True)
            held = ()
            sent += newly_sent
            loaded += newly_loaded
        return sent, loaded

    def finish(self):
        self.copier.gate.set()
        self.worker.close()
