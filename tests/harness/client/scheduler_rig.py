"""The connector's scheduler side over a sidecar double, with hand-made requests and steps."""

import threading
from dataclasses import replace
from types import SimpleNamespace

from lmcache_client.core.jobs import EngineIdentity, WorkerReport
from lmcache_client.core.parts import PartedIdentity, part_namespace
from lmcache_client.core.requests import Ticket
from lmcache_client.vllm.scheduler import VLLMScheduler
from lmcache_store import keys
from lmcache_store.kv_groups import KVGroup
from lmcache_store.tiers.base import ROW_KEY_BYTES
from lmcache_store.tiers.memory.contracts import Slot
from tests.harness.client.session_double import SessionDouble
from tests.harness.sidecar.wire import NAMESPACE, make_hello


def make_identity(*groups, chunk_tokens=64, **hello):
    """An engine that hashes every 32 tokens, by default with one group of full attention."""
    groups = groups or (KVGroup(0, 32, 4096),)
    return EngineIdentity(make_hello(chunk_tokens=chunk_tokens, groups=groups, **hello), 32)


IDENTITY = make_identity()
GRID = IDENTITY.grid


def introductions_of(identity):
    """The messages in which the parts of an engine identify themselves."""
    if not isinstance(identity, PartedIdentity):
        return [identity]
    parts = range(identity.num_parts)
    hellos = (replace(identity.hello, namespace=part_namespace(NAMESPACE, part)) for part in parts)
    return [replace(identity, part=part, hello=hello) for part, hello in enumerate(hellos)]


def hashes(num_tokens, name="p"):
    return [f"{name}{i}".encode() for i in range(num_tokens // GRID.hash_tokens)]


def make_request(num_tokens, request_id="r", **fields):
    defaults = {
        "request_id": request_id,
        "num_tokens": num_tokens,
        "num_computed_tokens": 0,
        "block_hashes": hashes(num_tokens),
        "lora_request": None,
        "cache_salt": None,
        "skip_reading_prefix_cache": False,
        "resumable": False,
    }
    return SimpleNamespace(**(defaults | fields))


def blocks(num, first=100):
    return list(range(first, first + num))


def num_chunks(job):
    (store,) = job.groups
    return len(store.keys) // ROW_KEY_BYTES


def job_ids(meta):
    return {job.job_id for job in meta.stores}


def chunk_ranges(meta):
    starts = [job.groups[0].first_chunk for job in meta.stores]
    return [(start, start + num_chunks(job)) for start, job in zip(starts, meta.stores, strict=True)]


def row_keys(group, *chunk_hashes):
    return b"".join(NAMESPACE + key for key in keys.chunk_keys(chunk_hashes, group=group))


class Rig:
    def __init__(self, identity=IDENTITY, introductions=None, make=VLLMScheduler, **settings):
        self.now = 0.0
        self.session = SessionDouble()
        self.extra_keys = {None: ()}
        self.scheduler = make(
            lambda _: self.session,
            SimpleNamespace(extra_keys_of=self._extra_keys_of),
            clock=lambda: self.now,
            num_blocks=1000,
            **settings,
        )
        self.scheduler.adopt(["another connector's message", *(introductions or introductions_of(identity))])
        self.lookups = self.scheduler._lookups
        self.tables = {}

    def _extra_keys_of(self, request, chunk_tokens):
        assert chunk_tokens == GRID.chunk_tokens
        if request.lora_request is None:
            return None
        return lambda: self.extra_keys[request.lora_request]

    def stored(self, num_chunks, name="p", **context):
        """Let the sidecar hold the first chunks of a prompt, see ``hashes``."""
        for chunk_hash in GRID.chunk_hashes(hashes(4096, name), 0, num_chunks):
            slot = Slot(len(self.session.rows), 1)
            self.session.rows[keys.chunk_keys([chunk_hash], **context)[0]] = slot
            self.session.committed.append(slot)

    def commit(self, meta, without=()):
        """Let the sidecar hold the rows that a step stores, but not those of some groups and chunks."""
        for store in (part for job in meta.stores for part in job.groups):
            for number, offset in enumerate(range(0, len(store.keys), ROW_KEY_BYTES)):
                if (store.group, store.first_chunk + number) not in without:
                    slot = Slot(len(self.session.rows), 1)
                    key = store.keys[offset : offset + ROW_KEY_BYTES].removeprefix(NAMESPACE)
                    self.session.rows[key] = slot
                    self.session.committed.append(slot)

    def schedule(self, request, num_computed_tokens, tables, **fields):
        """End a step after which this many tokens are computed."""
        self.scheduler.note_scheduled(request.request_id, lambda _: tables, num_computed_tokens, **fields)
        return self.scheduler.end_step(200)

    def drain_lookups(self):
        """Wait until the lookup thread has finished all tasks so far."""
        done = threading.Event()
        self.lookups.ask(Ticket("", [], b"", find_extra_keys=done.set))
        assert done.wait(60)

    def arrive(self, request):
        self.scheduler.on_new_request(request)
        self.drain_lookups()
        return request

    def waiting(self, request=None):
        """Let a request of three chunks arrive, which waits for them: lower tiers have them."""
        self.session.num_pending = 3
        request = self.arrive(request or make_request(200))
        assert self.match(request) == (None, False)
        return request

    def matched(self, request=None):
        """Let a request of three chunks arrive, which is offered them: memory has them."""
        self.stored(3)
        request = self.arrive(request or make_request(200))
        assert self.match(request) == (192, True)
        return request

    def loading(self, request=None):
        """Let a request of three chunks arrive and load them."""
        request = self.matched(request)
        self.begin(request)
        self.step()
        return request

    def computing(self, request=None):
        """Let a request arrive that finds nothing, and allocate its blocks."""
        request = self.arrive(request or make_request(200))
        assert self.begin(request) == 0
        return request

    def begin(self, request, computed=0):
        """Match a request and allocate its blocks. Returns the number of tokens that it loads."""
        num_tokens, _ = self.match(request, computed)
        self.allocate(request, blocks(-(-request.num_tokens // 32)), num_tokens)
        return num_tokens

    def match(self, request, computed=0):
        return self.scheduler.get_num_new_matched_tokens(request, computed)

    def allocate(self, request, ids, external):
        table = SimpleNamespace(get_block_ids=lambda: (ids,))
        self.scheduler.update_state_after_alloc(request, table, external)

    def step(self, new=(), cached=(), preempted=(), drafts=None):
        """``new``: (id, blocks, computed, scheduled). ``cached``: the same, and whether it was resumed."""
        for name, ids, *_ in (*new, *(item for item in cached if item[4])):
            self.tables[name] = list(ids)
        for name, ids, *_ in (item for item in cached if not item[4]):
            self.tables.setdefault(name, []).extend(ids or ())
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=id_, block_ids=(ids,), num_computed_tokens=computed)
                for id_, ids, computed, _ in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[item[0] for item in cached],
                resumed_req_ids={item[0] for item in cached if item[4]},
                new_block_ids=[(item[1],) if item[1] else None for item in cached],
                num_computed_tokens=[item[2] for item in cached],
            ),
            num_scheduled_tokens={item[0]: item[3] for item in (*new, *cached)},
            total_num_scheduled_tokens=sum(item[3] for item in (*new, *cached)),
            scheduled_spec_decode_tokens=drafts or {},
            preempted_req_ids=set(preempted),
            kv_connector_block_state=SimpleNamespace(
                get_block_ids=lambda name: (list(self.tables[name]),), boundary_state_offloads={}
            ),
        )
        return self.scheduler.build_connector_meta(output)

    def finish(self, request):
        return self.scheduler.finish(request, (self.tables.get(request.request_id, []),))

    def report(self, ended=(), failed=(), received=(), sent=()):
        report = WorkerReport()
        report.stores_ended.update(ended)
        report.failed_loads.update(failed)
        output = SimpleNamespace(
            kv_connector_worker_meta=report, finished_recving=set(received), finished_sending=set(sent)
        )
        self.scheduler.update_connector_output(output)
