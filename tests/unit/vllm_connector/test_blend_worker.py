"""The worker side of blended prompts: placed KV, order and budget of slices, and one report of each."""

import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from lmcache_client.core import worker as module
from lmcache_client.core.blend_jobs import Blended, BlendJob, BlendStep, Segment
from lmcache_client.core.jobs import StepMeta
from lmcache_client.core.layout import Layout
from lmcache_client.vllm.blend.worker import BlendingWorker
from lmcache_client.vllm.stats import BLEND_FIGURES
from lmcache_store.common.timing import TIMING
from lmcache_store.tiers.memory.contracts import Slot
from testing.child_process import wait_until
from tests.harness.client.scheduler_rig import make_identity
from tests.harness.client.session_double import SessionDouble
from tests.harness.client.worker_rig import IDENTITY, CopierDouble, found_rows

CHUNK, BLOCK, STAGING = 64, 32, -1
DONE = Blended(1, 2, 3)


class Executor:
    """Blends in passes of at most ``pass_tokens`` tokens, and notes them."""

    def __init__(self, copier):
        self.copier = copier
        self.staging = Layout((torch.zeros(4, 8, dtype=torch.uint8),), CHUNK // BLOCK)  # two rows
        self.kv = {}  # (request, position) -> (byte of its block, position in the block)
        self.inputs = {}
        self.passes = []
        self.pass_tokens = 10
        self.failing = {}  # request -> tokens after which it fails
        self.fails_to_place = False

    def place(self, job, begin, end, start, slot):
        assert torch.is_inference_mode_enabled()
        if self.fails_to_place:
            raise RuntimeError("no memory")
        for position, token in enumerate(range(slot, slot + end - begin), begin):
            self.kv[job.request_id, position] = int(self.copier.kv[token // BLOCK]), token % BLOCK

    def blend(self, job, is_placed, stored_at):
        assert torch.is_inference_mode_enabled()
        name, computed = job.request_id, 0
        self.inputs[name] = is_placed.clone(), stored_at.clone()
        total = self.failing.get(name, job.end - job.begin)
        limit = yield 0
        while computed < total:
            if size := min(limit, self.pass_tokens, total - computed):
                self.passes.append((name, size))
            computed += size
            limit = yield size
        if name in self.failing:
            raise RuntimeError("a pass failed")
        return DONE


class BlendRig:
    def __init__(self, identity=IDENTITY):
        self.session, self.copier = SessionDouble(), CopierDouble()
        self.copier.row_bytes |= {STAGING: 4096}
        self.executor = Executor(self.copier)
        self.staged = []

        def attach(_, staging):
            self.staged.append(staging)
            return self.session, self.copier, identity

        self.worker = BlendingWorker(attach, lambda _: cast(Any, self.executor), CHUNK)
        self.worker.register_kv_caches({})

    def rows(self, *values):
        """Commit rows whose two blocks hold the bytes ``value`` and ``value + 1``."""
        slots = []
        for value in values:
            slots.append(Slot(len(self.session.committed), 1))
            self.session.slots[slots[-1].row][:2] = value, value + 1
            self.session.committed.append(slots[-1])
        return found_rows(*slots)

    def job(self, name="r", segments=(), begin=0, documents=0, end=319):
        blocks = tuple(range(100, 100 + -(-(end + 1) // BLOCK)))
        return BlendJob(
            name, tuple(range(end + 1)), blocks, begin, documents, end, end, segments, "first", 0.1
        )

    def step(self, max_tokens=0, **fields):
        meta = StepMeta(blend=BlendStep(max_tokens=max_tokens, **fields), is_idle=True)
        self.worker.start_loads(meta)
        return meta

    def await_placed(self, name="r"):
        """Step until the prompt's KV is placed, as the scheduler side does."""
        placed = Counter()

        def is_placed():
            assert self.worker.collect(StepMeta(is_idle=True)) == (set(), set())
            placed.update((report := self.worker.take_report(StepMeta())) and report.blends_placed)
            return placed[name]

        wait_until(is_placed)
        assert placed[name] == 1

    def place(self, job):
        """Return (positions of placed tokens, positions at which they were computed)."""
        self.step(jobs=[job])
        self.await_placed(job.request_id)
        self.step(ready=[job.request_id], max_tokens=1)
        is_placed, stored_at = self.executor.inputs[job.request_id]
        return is_placed.nonzero().flatten().tolist(), stored_at[is_placed].tolist()

    def end(self):
        """Return what the step reports: (ended loads, their bad blocks, failed loads, results)."""
        _, loaded = self.worker.collect(StepMeta())
        bad, report = self.worker.take_bad_blocks(), self.worker.take_report(StepMeta())
        return loaded, bad, report.failed_loads if report else set(), report.blended if report else {}

    def finish(self):
        self.copier.gate.set()
        self.worker.close()


@pytest.fixture
def rig(monkeypatch):
    monkeypatch.setattr(TIMING, "start_seconds", 60.0)
    rig = BlendRig()
    yield rig
    rig.finish()


def test_rows_of_documents_are_placed_at_their_positions(rig):
    """The exact prefix is the first segment. Five rows and a tail of 20 tokens exceed the staging blocks."""
    prefix = Segment(0, 32, 64, rig.rows(10))
    document = Segment(70, 80, 250, rig.rows(20, 30, 40))
    job = rig.job(segments=(prefix, document), begin=32, documents=70)
    placed, stored_at = rig.place(job)
    assert placed == [*range(32, 64), *range(80, 250)]
    assert stored_at == [*range(32, 64), *range(10, 180)]
    assert rig.executor.kv == {("r", position): (11, position - 32) for position in range(32, 64)} | {
        ("r", 70 + token): (20 + token // CHUNK * 10 + token // BLOCK % 2, token % BLOCK)
        for token in range(10, 180)
    }
    assert rig.copier.fences == ["fence"] * 4, "staged rows replace KV that the engine's work may still read"
    assert rig.staged == [rig.executor.staging]


def test_rows_before_the_engines_tokens_are_not_read(rig):
    placed, _ = rig.place(rig.job(segments=(Segment(0, 130, 192, rig.rows(1, 2, 3)),), begin=130))
    assert placed == list(range(130, 192))
    assert len(rig.copier.fences) == 1


def test_row_that_was_evicted_during_its_copy_is_not_placed(rig):
    document = Segment(0, 0, 192, rig.rows(10, 20, 30))
    other = Segment(192, 192, 256, rig.rows(40))
    evicted = rig.session.committed[1]
    rig.copier.after_copy = lambda: suppress_missing(rig.session.committed, evicted)
    placed, _ = rig.place(rig.job(segments=(document, other)))
    assert placed == [*range(64), *range(128, 256)]


def suppress_missing(slots, slot):
    with suppress(ValueError):
        slots.remove(slot)


@pytest.mark.parametrize("fault", ["away", "copy", "place", "offline"])
def test_prompt_whose_rows_cannot_be_loaded_is_computed(rig, fault):
    job = rig.job(segments=(Segment(0, 0, 64, rig.rows(10)),))
    if fault == "away":
        rig.session.slots = None
    elif fault == "copy":
        rig.copier.after_copy = lambda: 1 / 0
    elif fault == "place":
        rig.executor.fails_to_place = True
    else:
        rig.worker.go_offline()
    assert rig.place(job) == ([], [])
    rig.step(max_tokens=1000)
    assert rig.end() == ({"r"}, set(), set(), {"r": DONE})


def test_slices_keep_the_order_and_the_budget(rig):
    jobs = [rig.job("a", end=25), rig.job("b", end=15), rig.job("c", end=15)]
    rig.step(jobs=jobs, max_tokens=100)
    for name in "abc":
        wait_until(lambda name=name: rig.worker._blends[name].ended.is_set())
    rig.worker.collect(StepMeta())
    assert rig.worker.take_report(StepMeta()).blends_placed == {"a": 1, "b": 1, "c": 1}
    meta = rig.step(ready=["b", "a"], max_tokens=12)
    rig.worker.start_loads(meta)
    assert rig.executor.passes == [("b", 10), ("b", 2)], "the slices of a step run once"
    rig.step(ready=["c"], max_tokens=13)
    assert rig.executor.passes[2:] == [("b", 3), ("a", 10)]
    assert rig.end() == ({"b"}, set(), set(), {"b": DONE})
    rig.step(max_tokens=15)
    assert rig.executor.passes[4:] == [("a", 10), ("a", 5)]
    assert rig.end() == ({"a"}, set(), set(), {"a": DONE}), "a blend ends with its last slice"
    assert rig.end() == (set(), set(), set(), {})


def test_failed_prompt_loses_what_may_be_inexact_and_no_other(rig):
    """The exact prefix ends at token 100, so block 3 holds tokens of the document, too."""
    prefix = Segment(0, 0, 100, rig.rows(10, 20))
    jobs = [rig.job(name, segments=(prefix,), documents=100, end=255) for name in "ab"]
    rig.step(jobs=jobs)
    for name in "ab":
        wait_until(lambda name=name: rig.worker._blends[name].ended.is_set())
    rig.worker.collect(StepMeta())
    rig.worker.take_report(StepMeta())
    rig.executor.failing["a"] = 10
    rig.step(ready=["a", "b"], max_tokens=1000)
    assert rig.end() == ({"a", "b"}, {103, 104, 105, 106, 107}, {"a"}, {"b": DONE})
    figures = rig.worker.take_figures()
    assert figures.pop("blend_place_seconds") > 0
    assert figures.pop("blend_compute_seconds") > 0
    tokens = {"blend_reused_tokens": 1, "blend_recomputed_tokens": 2, "blend_missing_tokens": 3}
    assert figures == tokens | {"blends": 1, "failed_blends": 1}
    assert figures.keys() < BLEND_FIGURES.keys()
    rig.step(max_tokens=1000)
    assert rig.worker.take_figures() == {}


@pytest.mark.parametrize(
    "fields", [{"is_replica": True}, {"hello": make_identity(column=1, num_columns=2).hello}]
)
def test_tokens_of_a_prompt_are_counted_on_one_rank(monkeypatch, fields):
    monkeypatch.setattr(TIMING, "start_seconds", 60.0)
    rig = BlendRig(replace(IDENTITY, **fields))
    rig.place(rig.job(end=1))
    assert rig.end()[3] == {"r": DONE}
    assert rig.worker.take_figures().keys() == {"blend_place_seconds", "blend_compute_seconds"}
    rig.finish()


def test_prefix_with_a_gap_is_exact_up_to_the_gap(rig):
    first, moved = Segment(0, 32, 64, rig.rows(10)), Segment(64, 64, 96, rig.rows(20))
    last = Segment(0, 96, 128, rig.rows(10, 30))
    rig.place(rig.job(segments=(first, moved, last), begin=32, documents=128, end=255))
    rig.step(dropped=["r"])
    assert rig.end()[1] == set(range(102, 108)), "KV that was moved is not exact"


@pytest.mark.parametrize("begin", [64, 96])
def test_prompt_that_continues_blended_blocks_loses_only_later_ones(rig, begin):
    """The engine's own cache has the beginning of a document, or all of it. A client aborts the request."""
    segments = (Segment(20, 96, 148, rig.rows(10, 20)),)
    rig.place(rig.job(segments=segments, begin=begin, documents=20, end=255))
    rig.step(dropped=["r"])
    assert rig.end() == ({"r"}, set(range(100 + begin // BLOCK, 108)), {"r"}, {})


def test_dropped_prompt_ends_after_its_copy(rig):
    rig.copier.gate.clear()
    rig.step(jobs=[rig.job(segments=(Segment(0, 0, 192, rig.rows(1, 2, 3)),))])
    assert rig.copier.in_copy.wait(60)
    rig.step(dropped=["r"])
    assert rig.end()[0] == set(), "its blocks are still written"
    rig.copier.gate.set()
    wait_until(lambda: rig.worker._blends["r"].ended.is_set())
    assert rig.end() == ({"r"}, set(range(100, 110)), {"r"}, {})
    assert len(rig.copier.fences) == 2, "no further rows are copied"
    rig.step(ready=["r"], dropped=["r"], max_tokens=100)
    assert rig.end() == (set(), set(), set(), {})


def test_idle_engine_waits_until_kv_is_placed(rig, monkeypatch):
    """The scheduler side needs the report, without which no slice begins."""
    monkeypatch.setattr(module, "LOAD_WAIT_SECONDS", 60)
    segments = (Segment(0, 0, 64, rig.rows(1)),)
    rig.copier.gate.clear()
    monkeypatch.setattr(rig.worker, "_may_wait", lambda: rig.copier.gate.set() or True)
    rig.step(jobs=[rig.job("a", segments)])
    rig.worker.collect(StepMeta(is_idle=True))
    assert rig.worker.take_report(StepMeta()).blends_placed == {"a": 1}
    rig.copier.gate.clear()
    rig.step(jobs=[rig.job("b"), rig.job("c", segments)])
    wait_until(lambda: rig.worker._blends["b"].ended.is_set())
    rig.worker.collect(StepMeta(is_idle=True))
    assert rig.worker.take_report(StepMeta()).blends_placed == {"b": 1}


def test_job_that_cannot_begin_costs_no_other(rig):
    """The connector calls a hook that failed once more."""
    meta = StepMeta(blend=BlendStep(jobs=[rig.job("a"), rig.job("b", end=-2)]))
    for _ in range(2):
        with pytest.raises(RuntimeError):
            rig.worker.start_loads(meta)
    rig.worker._loader.submit(lambda: None).result(60)
    rig.await_placed("a")
    rig.step(ready=["a"], max_tokens=1000)
    assert rig.end() == ({"a"}, set(), set(), {"a": DONE})


def test_idle_engine_does_not_wait_while_slices_are_ready(rig, monkeypatch):
    waits = []
    monkeypatch.setattr(rig.worker, "_wait_for_a_load", lambda _: waits.append(1))
    rig.step(jobs=[rig.job("a")])
    rig.await_placed("a")
    waits.clear()
    rig.copier.gate.clear()
    rig.step(ready=["a"], jobs=[rig.job("b", segments=(Segment(0, 0, 64, rig.rows(1)),))], max_tokens=5)
    rig.worker.collect(StepMeta(is_idle=True))
    assert not waits
    rig.step(max_tokens=1000)
    assert rig.worker.collect(StepMeta(is_idle=True))[1] == {"a"}
    assert not waits
    rig.worker.collect(StepMeta(is_idle=True))
    assert waits


def test_close_returns_with_open_prompts(rig):
    rig.step(jobs=[rig.job("a"), rig.job("b")])
    rig.await_placed("a")
    rig.step(ready=["a"], max_tokens=5)
    rig.worker.close()


@pytest.mark.parametrize("seed", range(30))
def test_each_prompt_is_reported_once_in_any_order_of_events(rig, seed):
    """Plays a scheduler that drops prompts, failures, a rank that goes offline, and steps called twice."""
    chance = random.Random(seed)
    jobs = {name: rig.job(name, end=chance.randrange(1, 60)) for name in map(str, range(12))}
    rig.executor.failing = {
        name: chance.randrange(job.end) for name, job in jobs.items() if chance.random() < 0.3
    }
    waiting, ready, begun, dropped, ended = list(jobs), [], [], set(), Counter()
    failed, results = set(), {}

    def play(**fields):
        budget, before = chance.choice((0, 7, 30)), len(rig.executor.passes)
        meta = StepMeta(blend=BlendStep(max_tokens=budget, **fields), is_idle=chance.random() < 0.2)
        calls = [rig.worker.start_loads] * chance.choice((1, 1, 2)) + [collect]
        if chance.random() < 0.3:
            calls.reverse()
        for call in calls:
            call(meta)
        assert sum(size for _, size in rig.executor.passes[before:]) <= budget

    def collect(meta):
        _, loaded = rig.worker.collect(meta)
        bad, report = rig.worker.take_bad_blocks(), rig.worker.take_report(meta)
        ended.update(loaded)
        if report is not None:
            assert report.blended.keys() | report.failed_loads == loaded
            assert not report.blended.keys() & report.failed_loads
            failed.update(report.failed_loads)
            results.update(report.blended)
            ready.extend(report.blends_placed)
        assert bool(bad) == bool(report and report.failed_loads)

    def steps():
        now = [ready.pop(0) for _ in range(len(ready)) if chance.random() < 0.7]
        begun.extend(now)
        new = [jobs[waiting.pop()] for _ in range(chance.randrange(3)) if waiting]
        drops = [name for name in jobs if name not in waiting and chance.random() < 0.02]
        dropped.update(drops)
        play(jobs=new, ready=now, dropped=drops)
        if chance.random() < 0.02:
            rig.worker.go_offline()
        return len(ended) == len(jobs)

    deadline = time.monotonic() + 60
    while not steps():
        if time.monotonic() > deadline:
            raise AssertionError((ended, waiting, ready))
    play()
    assert ended == dict.fromkeys(jobs, 1)
    assert failed.isdisjoint(results)
    assert failed <= dropped | rig.executor.failing.keys()
    assert set(results.values()) <= {DONE}
    assert not {name for name in rig.executor.failing if name not in dropped} & results.keys()
    order = list(dict.fromkeys(name for name, _ in rig.executor.passes))
    assert order == [name for name in begun if name in order], "prompts are computed in their order"
