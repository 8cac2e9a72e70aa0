"""Documents that are taken out of computed prompts: which ones, under which keys, and how they are copied."""

import hashlib
import pickle
import threading
from typing import Any, cast

import numpy as np
import pytest
import torch

from lmcache_client.core.blend_jobs import BlendJob, BlendStep, Segment
from lmcache_client.core.copier import STAGING_GROUP
from lmcache_client.core.jobs import GroupLoad, GroupStore, LoadJob, StepMeta
from lmcache_client.core.layout import Layout
from lmcache_client.vllm.blend.documents import find_claim, key_hashes
from lmcache_client.vllm.blend.params import BlendParams
from lmcache_client.vllm.blend.prompt import PromptPasses
from lmcache_client.vllm.blend.taking import TakeJob
from lmcache_client.vllm.blend.worker import BlendingWorker
from lmcache_store import keys
from lmcache_store.common.timing import TIMING
from lmcache_store.tiers.memory.contracts import Found, Slot
from testing.child_process import wait_until
from tests.harness.client.blend_rig import QUESTION, FakeRequest, document, fake_hashes, prompt
from tests.harness.client.scheduler_rig import GRID, blocks
from tests.harness.client.session_double import SessionDouble
from tests.harness.client.worker_rig import IDENTITY, CopierDouble, found_rows
from tests.harness.sidecar.wire import NAMESPACE

START = [5] * 40
BLEND = {"documents": [200, 200], "start": len(START)}


def ask(rig, tokens, name="r", computed=0, **fields):
    """Let a request arrive. Returns it and the engine's last offer."""
    request, offer = rig.ask(tokens, name, computed=computed, **{"blend": BLEND, **fields})
    while offer[0] is None:
        rig.drain_lookups()
        offer = rig.match(request, computed)
    return request, offer


def compute(rig, tokens, name="r", computed=0, **fields):
    """Let the engine compute a prompt, and store its chunks. Returns the request and its other stores."""
    request, (num_loaded, _) = ask(rig, tokens, name, computed, **fields)
    first, table = computed + num_loaded, blocks(-(-len(tokens) // 32))
    rig.allocate(request, table, num_loaded)
    if num_loaded:
        rig.step()
        rig.report(received=[name])
    meta = pickle.loads(pickle.dumps(rig.step(new=[(name, table, first, len(tokens) - first)])))
    rig.commit(meta)
    rig.report(ended=[job.job_id for job in meta.stores])
    request.num_computed_tokens = len(tokens)
    request.all_token_ids.append(8)
    chunks = keys.chunk_keys(GRID.chunk_hashes(fake_hashes(tokens, fields.get("cache_salt")), 0, 99))
    is_chunk = [job.groups[0].keys[32:64] in chunks for job in meta.stores]
    return request, [job for job, is_of_prompt in zip(meta.stores, is_chunk, strict=True) if not is_of_prompt]


def taken_keys(number, salt=""):
    """Row keys of a document that is taken."""
    hashes = key_hashes(GRID, fake_hashes(document(number), salt))
    taken = [hashlib.sha256(b"taken" + block_hash).digest() for block_hash in hashes]
    return b"".join(NAMESPACE + key for key in keys.chunk_keys(taken, cache_salt=salt))


def test_unknown_documents_of_a_computed_prompt_are_stored_once(rig):
    request, (first, second) = compute(rig, prompt(1, 2, start=START))
    assert (first.start, first.num_tokens, first.groups[0].keys) == (40, 192, taken_keys(1))
    assert (second.start, second.num_tokens, second.groups[0].keys) == (240, 192, taken_keys(2))
    # Tokens 40 to 231 are in blocks 1 to 7. A chunk that begins inside a block is in three blocks.
    assert first.groups[0].blocks == (101, 102, 103, 103, 104, 105, 105, 106, 107)
    assert second.groups[0].blocks == (107, 108, 109, 109, 110, 111, 111, 112, 113)
    assert rig.step(cached=[("r", None, 460, 1, False)]).stores == []
    assert rig.finish(request) is False


def test_documents_in_another_order_are_blended_with_taken_rows(rig):
    compute(rig, prompt(1, 2, start=START))
    request, offer = ask(rig, prompt(2, 1, start=START), "s")
    assert offer == (459, True)
    rig.allocate(request, blocks(15), 459)
    meta = rig.step()
    assert meta.stores == []
    (job,) = meta.blend.jobs
    assert [segment[:3] for segment in job.segments] == [(40, 40, 232), (240, 240, 432)]
    assert all(segment.is_taken for segment in job.segments)
    assert rig.leases() == {"s#0 taken", "s#1 taken"}
    rig.report_blends(placed=["s"])
    assert rig.leases() == set()


def test_blocks_are_held_until_the_workers_have_read_them(rig):
    tokens = prompt(1, 2, start=START)
    request, _ = ask(rig, tokens)
    rig.allocate(request, blocks(15), 0)
    takes = [job for job in rig.step(new=[("r", blocks(15), 0, 460)]).stores if isinstance(job, TakeJob)]
    request.num_computed_tokens = 460
    assert rig.finish(request) is True
    assert rig.step().held == ["r"]
    rig.report(ended=[job.job_id for job in takes], sent=["r"])
    assert rig.scheduler._states == {}


def test_preempted_prompt_is_not_taken_from_the_blocks_that_it_lost(rig):
    request, _ = ask(rig, prompt(1, 2, start=START))
    rig.allocate(request, blocks(15), 0)
    first = rig.step(new=[("r", blocks(15), 0, 460)]).stores
    meta = rig.step(preempted=["r"])
    assert {job.job_id for job in first} <= meta.reclaimed
    assert rig.match(request) == (None, False)
    rig.drain_lookups()
    while (offer := rig.match(request))[0] is None:
        rig.drain_lookups()
    rig.allocate(request, blocks(15, 300), 0)
    again = rig.step(new=[("r", blocks(15, 300), 0, 460)]).stores
    assert [job.groups[0].blocks[0] for job in again if isinstance(job, TakeJob)] == [301, 307]
    assert offer == (0, False)


@pytest.mark.parametrize("when", ["during the prompt", "before the prompt"])
def test_prompt_that_is_aborted_or_reset_stores_nothing(rig, when):
    request, _ = ask(rig, prompt(1, 2, start=START))
    if when == "before the prompt":
        rig.scheduler.begin_namespace("a reset")
        rig.allocate(request, blocks(15), 0)
        assert rig.step(new=[("r", blocks(15), 0, 460)]).stores == []
        return
    rig.allocate(request, blocks(15), 0)
    meta = rig.step(new=[("r", blocks(15), 0, 400)])
    assert not [job for job in meta.stores if isinstance(job, TakeJob)]
    rig.report(ended=[job.job_id for job in meta.stores])
    request.num_computed_tokens = 400
    assert rig.finish(request) is False


def test_prompt_after_blocks_of_the_engines_cache_is_not_taken(rig):
    """These blocks have the salt of blended prompts, so they may be blended."""
    assert compute(rig, prompt(1, 2, start=START), computed=32)[1] == []


def test_exact_prefix_is_loaded_and_later_documents_are_taken(rig):
    tokens = prompt(1, 2, start=START)
    rig.store_rows(tokens, 4)
    _, jobs = compute(rig, tokens)
    assert [job.start for job in jobs] == [240], "the first document is in the exact prefix"


def test_prompt_whose_load_failed_is_not_taken(rig):
    tokens = prompt(1, 2, start=START)
    rig.store_rows(tokens, 1)
    request, (num_loaded, _) = ask(rig, tokens)
    rig.allocate(request, blocks(15), num_loaded)
    rig.step()
    rig.report(failed={"r"}, received=["r"])
    meta = rig.step(new=[("r", blocks(15), 0, 460)])
    assert not [job for job in meta.stores if isinstance(job, TakeJob)]


def test_document_with_exact_rows_is_not_taken(rig):
    rig.store_rows(document(1), 1)
    _, (job,) = compute(rig, prompt(1, 2, start=START))
    assert job.start == 240
    rig.store_rows(document(2))
    request, _ = ask(rig, prompt(2, 1, start=START), "s")
    assert [segment.is_taken for segment in rig.scheduler._asked["s"].claim.segments] == [False, False]
    assert request.cache_salt


def test_rest_of_a_taken_document_is_stored_again(rig):
    """Last rows are evicted first. The first one may remain as long as prompts name the document."""
    compute(rig, prompt(1, 2, start=START))
    for number in (1, 2):
        hashes = key_hashes(GRID, fake_hashes(document(number)))[1:]
        for key in keys.chunk_keys([hashlib.sha256(b"taken" + block_hash).digest() for block_hash in hashes]):
            rig.session.committed.remove(rig.session.rows.pop(key))
    _, jobs = compute(rig, prompt(2, 1, start=START), "s")
    assert [(job.start, job.groups[0].keys) for job in jobs] == [(40, taken_keys(2)), (240, taken_keys(1))]


def test_short_documents_are_not_taken(rig):
    tokens = START + document(1, 63) + document(2) + QUESTION
    _, (job,) = compute(rig, tokens, blend={"documents": [63, 200], "start": 40})
    assert job.start == 103


def test_exact_lookups_never_find_taken_rows(rig):
    compute(rig, prompt(1, 2, start=START), cache_salt="tenant")
    for number in (1, 2):
        request = rig.arrive(FakeRequest(document(number) + QUESTION, f"exact {number}", cache_salt="tenant"))
        assert rig.match(request) == (0, False)
    assert ask(rig, prompt(2, 1, start=START), "other salt")[1] == (0, False)


def test_document_at_the_beginning_gets_an_exact_tail(rig):
    """The KV of this document does not depend on another one, and its chunks are those of the prompt."""
    tokens = document(1, 250) + document(2) + QUESTION
    _, (tail, other) = compute(rig, tokens, blend={"documents": [250, 200]})
    assert [isinstance(job, TakeJob) for job in (tail, other)] == [False, True]
    (key,) = keys.chunk_keys(fake_hashes(document(1, 250))[-1:])
    assert (tail.groups[0].keys, tail.groups[0].blocks) == (NAMESPACE + key, (106, 106))
    _, offer = ask(rig, START + document(1, 250) + QUESTION, "s", blend={"documents": [250], "start": 40})
    assert offer == (309, True)
    (segment,) = rig.scheduler._asked["s"].claim.segments
    assert (segment.begin, segment.end, segment.is_taken) == (40, 264, False)


def test_requests_with_a_lower_tier_wait_for_taken_rows(make_rig):
    rig = make_rig()
    compute(rig, prompt(1, 2, start=START))
    assert ask(rig, prompt(2, 1, start=START), "s")[1] == (459, True)


def rows(num_rows):
    return Found(np.arange(num_rows), np.ones(num_rows, np.uint64))


def test_taken_rows_at_the_beginning_are_not_exact():
    params = BlendParams((range(200), range(200, 400)), "attended", 0.15)
    stored = rows(3), rows(4)
    assert find_claim(params, GRID, 0, rows(0), stored, 300, 420) is None
    claim = find_claim(params, GRID, 0, rows(1), stored, 300, 420, taken={0})
    assert [(segment.begin, segment.is_taken) for segment in claim.segments] == [
        (0, False),
        (64, True),
        (200, False),
    ]
    job = claim.job("r", FakeRequest(prompt(1, 2)), blocks(14))
    assert job.exact_end == 64
    is_placed, stored_at = torch.ones(job.end, dtype=torch.bool), torch.arange(job.end)
    stored_at[200:] -= 200
    passes = PromptPasses(job, is_placed, stored_at, cast(Any, None), {}, {})
    chosen = passes.choose(torch.ones(job.end, dtype=torch.bool))
    assert not chosen[:64].any()
    assert chosen[64:].all()


class Taker:
    """Notes the chunks that are moved, and moves the number of their first block."""

    def __init__(self, copier):
        self.copier, self.calls = copier, []
        self.staging = Layout((torch.zeros(4, 8, dtype=torch.uint8),), 2)  # two rows
        self.after_take = lambda: None

    def place(self, job, *_):
        self.calls.append(job.request_id)

    def take(self, job, chunks, blocks):
        self.calls.append((job.start, chunks))
        for number, block in enumerate(blocks):
            self.copier.kv |= {2 * number: block[0], 2 * number + 1: block[1]}
        self.after_take()


class TakeRig:
    def __init__(self):
        self.session, self.copier = SessionDouble(), CopierDouble()
        self.copier.row_bytes |= {STAGING_GROUP: 4096}
        self.taker, self.groups = Taker(self.copier), []
        self._copy, self.copier.store = self.copier.store, self._store
        attached = self.session, self.copier, IDENTITY
        self.worker = BlendingWorker(lambda *_: attached, lambda _: cast(Any, self.taker), 64)
        self.worker.register_kv_caches({})

    def _store(self, group, *rest):
        self.groups.append(group)
        return self._copy(group, *rest)

    def job(self, name=b"d", num_rows=3, job_id=1):
        row_keys = b"".join(NAMESPACE + (name + b"%d" % number).ljust(32) for number in range(num_rows))
        part = GroupStore(0, 0, row_keys, tuple(range(10, 10 + 3 * num_rows)))
        return TakeJob(job_id, "r", (part,), start=40, num_tokens=64 * num_rows - 20)

    def take(self, *jobs):
        self.worker.start_stores(StepMeta(stores=list(jobs)))

    def wait(self, num_jobs=1):
        """Return the jobs that ended."""
        ended = {}

        def have_ended():
            self.worker.collect(StepMeta())
            if report := self.worker.take_report(StepMeta()):
                ended.update(report.stores_ended)
            return len(ended) == num_jobs

        wait_until(have_ended)
        return ended

    def stored(self):
        return [self.session.slots[slot.row][:2].tolist() for slot in self.session.committed]


@pytest.fixture
def takes(monkeypatch):
    monkeypatch.setattr(TIMING, "start_seconds", 60.0)
    rig = TakeRig()
    yield rig
    rig.copier.gate.set()
    rig.worker.close()


def test_chunks_go_through_the_staging_blocks_to_their_rows(takes):
    takes.take(takes.job())
    assert takes.wait() == {1: 1}
    assert takes.taker.calls == [(40, (0, 1)), (40, (2,))]
    assert takes.stored() == [[10, 11], [13, 14], [16, 17]]
    assert set(takes.groups) == {STAGING_GROUP}
    assert takes.copier.waits == ["fence"], "the step that writes the blocks must end first"
    takes.take(takes.job(job_id=2))
    takes.wait()
    assert len(takes.taker.calls) == 2, "rows that are stored are not moved again"


def test_loads_do_not_wait_for_documents_that_are_taken(takes):
    """Only loads to the staging blocks wait, and only while these blocks are in use."""
    gate, loaded = threading.Event(), set()
    takes.taker.after_take = lambda: gate.wait(60)
    takes.session.committed.append(Slot(60, 1))
    row = found_rows((60, 1))
    takes.take(takes.job(), takes.job(b"e", job_id=2))
    wait_until(lambda: takes.taker.calls)
    load = LoadJob("load", (GroupLoad(0, (90, 91), row, 0, 2),))
    takes.worker.start_loads(StepMeta(loads=[load]))
    blend = BlendJob("b", (1,) * 65, (80, 81, 82), 0, 0, 64, 64, (Segment(0, 0, 64, row),), "all", 1.0)
    takes.worker.start_loads(StepMeta(blend=BlendStep(jobs=[blend])))

    def is_loaded():
        loaded.update(takes.worker.collect(StepMeta())[1])
        return loaded

    wait_until(is_loaded)
    assert (loaded, takes.taker.calls) == ({"load"}, [(40, (0, 1))])
    gate.set()
    assert takes.wait(2) == {1: 1, 2: 1}
    wait_until(lambda: "b" in takes.taker.calls)
    assert takes.stored() == [[0, 0], *[[10, 11], [13, 14], [16, 17]] * 2]


@pytest.mark.parametrize("fault", ["take", "copy", "down", "offline", "reclaimed", "reset"])
def test_document_that_cannot_be_copied_is_not_stored(takes, fault):
    if fault == "take":
        takes.taker.after_take = lambda: 1 / 0
    elif fault == "copy":
        takes.copier.after_copy = lambda: 1 / 0
    elif fault == "down":
        takes.session.is_down = True
    elif fault == "offline":
        takes.worker.go_offline()
    else:  # while the blocks are read
        meta = StepMeta(reclaimed={1}) if fault == "reclaimed" else StepMeta(left_behind={1})
        takes.worker._can_wait = False
        takes.taker.after_take = lambda: takes.worker.handle_preemptions(meta)
    takes.take(takes.job())
    assert takes.wait() == {1: 1}, "the engine's blocks are released"
    assert takes.session.committed == []
    reserved = 0 if fault in ("down", "offline") else 3
    assert len(takes.session.aborted) == reserved
    assert takes.worker._stores == {}


def test_segment_of_a_prompt_is_exact_by_default():
    job = BlendJob("r", (1, 2), (0,), 0, 0, 1, 1, (Segment(0, 0, 1, rows(1)),), "all", 1.0)
    assert job.exact_end == 1
