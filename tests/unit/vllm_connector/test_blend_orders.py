"""Blended prompts in random orders of the engine's hooks, over two simulated ranks."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest

from lmcache_client.core.blend_jobs import Blended
from lmcache_client.core.jobs import WorkerReport
from tests.harness.client.blend_rig import FakeRequest, document, prompt
from tests.harness.client.scheduler_rig import blocks

NUM_RANKS = 2


class World:
    """An engine with its workers, which take one random action after the other."""

    def __init__(self, rig, seed):
        self.rig, self.random = rig, random.Random(seed)
        self.num_requests = 0
        self.waiting = {}  # requests without blocks
        self.loading = {}  # request id -> its request; None: it was aborted
        self.running = {}
        self.placing = {}  # request id -> ranks that have not placed its rows
        self.ready = set()
        self.to_end = {}  # blends and loads that the workers must end -> True if it failed
        self.never_stored = set()
        self.num_ended = Counter()

    def arrive(self):
        self.num_requests += 1
        request_id = f"r{self.num_requests}"
        numbers = self.random.sample([1, 2, 3], 2)
        blend = {"documents": [200, 200]} if self.random.random() < 0.8 else None
        request = FakeRequest(prompt(*numbers), request_id, blend, lora_request=None)
        self.rig.arrive(request)
        self.waiting[request_id] = request

    def schedule(self):
        """Ask for a waiting request, and allocate its blocks."""
        if not self.waiting:
            return
        request_id = self.random.choice(list(self.waiting))
        request = self.waiting[request_id]
        if request.num_computed_tokens:  # its load failed in part
            del self.waiting[request_id]
            self.running[request_id] = request
            return
        num_cached = self.random.choice([0, 0, 0, 32, 224])
        num_tokens, is_async = self.rig.match(request, num_cached)
        if num_tokens is None:
            return
        asked = self.rig.scheduler._asked.get(request_id)
        if asked and (num_cached or asked.claim):
            self.never_stored.add(request_id)
        del self.waiting[request_id]
        if self.random.random() < 0.1:  # vLLM has no blocks for it, and asks again
            self.waiting[request_id] = request
            return
        self.rig.allocate(request, blocks(-(-request.num_tokens // 32)), num_tokens)
        request.num_computed_tokens = num_cached + num_tokens
        (self.loading if is_async else self.running)[request_id] = request

    def step(self):
        """Run a step of all running requests, and give its message to the workers."""
        new, cached = [], []
        for request_id, request in self.running.items():
            if (num_new := request.num_tokens - request.num_computed_tokens) > 0:
                ids = blocks(-(-request.num_tokens // 32))
                new.append((request_id, ids, request.num_computed_tokens, num_new))
                request.num_computed_tokens += num_new
                request.all_token_ids.append(8)
                request.update_block_hashes()
        meta = self.rig.step(new=new, cached=cached)
        self.take(meta)

    def take(self, meta):
        for job in meta.stores:
            assert job.request_id not in self.never_stored
        self.rig.report(ended={job.job_id: NUM_RANKS for job in meta.stores})
        for load in meta.loads:
            self.begin(load.request_id)
            self.to_end[load.request_id] = not load.pieces()
        if meta.blend is None:
            assert not self.ready
            return
        for job in meta.blend.jobs:
            self.begin(job.request_id)
            self.placing[job.request_id] = NUM_RANKS
        for request_id in meta.blend.ready:
            assert self.placing.pop(request_id) == 0
            self.ready.add(request_id)
        for request_id in meta.blend.dropped:
            assert (request_id in self.placing) + (request_id in self.ready) == 1, "dropped twice, or unknown"
            self.placing.pop(request_id, None)
            self.ready.discard(request_id)
            self.to_end[request_id] = True
        assert meta.blend.max_tokens or not self.ready

    def begin(self, request_id):
        assert request_id in self.loading, "vLLM does not wait for it"
        assert not {request_id} & {*self.placing, *self.ready, *self.to_end}

    def work(self):
        """Let the workers report something."""
        report, received = WorkerReport(), set()
        for request_id, num_missing in self.placing.items():
            if num_missing and self.random.random() < 0.5:
                self.placing[request_id] -= 1
                report.blends_placed[request_id] += 1
        for request_id in [name for name in self.ready if self.random.random() < 0.3]:
            self.ready.remove(request_id)
            received.add(request_id)
            if self.random.random() < 0.9:
                report.blended[request_id] = Blended(300, 60, 20)
            else:
                report.failed_loads.add(request_id)
        for request_id in [name for name in self.to_end if self.random.random() < 0.5]:
            received.add(request_id)
            if self.to_end.pop(request_id):
                report.failed_loads.add(request_id)
        for request_id in received:
            self.num_ended[request_id] += 1
            request = self.loading.pop(request_id)
            if request is not None:
                if request_id in report.failed_loads:
                    request.num_computed_tokens = self.random.choice([0, 32])
                    self.waiting[request_id] = request
                else:
                    self.running[request_id] = request
        output = SimpleNamespace(
            kv_connector_worker_meta=report, finished_recving=received, finished_sending=set()
        )
        self.rig.scheduler.update_connector_output(output)

    def finish(self):
        """Finish or abort a request."""
        if not (
            names := [*self.waiting, *self.running, *(name for name in self.loading if self.loading[name])]
        ):
            return
        request_id = self.random.choice(names)
        requests = (group.get(request_id) for group in (self.waiting, self.running, self.loading))
        (request,) = filter(None, requests)
        self.rig.scheduler.hand_over(request)
        self.rig.tables[request_id] = blocks(-(-request.num_tokens // 32))
        self.rig.finish(request)
        self.waiting.pop(request_id, None)
        self.running.pop(request_id, None)
        if request_id in self.loading:
            self.loading[request_id] = None

    def preempt(self):
        if self.running:
            request_id = self.random.choice(list(self.running))
            self.waiting[request_id] = request = self.running.pop(request_id)
            request.num_computed_tokens = 0
            self.take(self.rig.step(preempted=[request_id]))

    def reset(self):
        self.rig.scheduler.note_change("a test")
        for number in (1, 2, 3):
            self.rig.store_rows(document(number))

    def forget(self):
        unlucky = self.random.randrange(self.num_requests + 1)
        self.rig.scheduler.forget(lambda request: request.request_id == f"r{unlucky}")

    def go_offline(self):
        """Raise in the middle of a step, as ``connector`` would see it."""

        def complete(meta):
            raise RuntimeError("a test")

        self.rig.scheduler._complete = complete
        with pytest.raises(RuntimeError):
            self.rig.step()
        self.rig.scheduler.go_offline()
        self.take(self.rig.step())

    def end(self):
        """Finish all requests, and let the workers end all work."""
        while self.waiting or self.running or any(self.loading.values()):
            self.finish()
        while self.loading:
            self.step()
            self.work()
        self.step()


@pytest.mark.parametrize("is_offline_at_end", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_each_blended_prompt_ends_once_and_no_lease_is_left(make_rig, seed, is_offline_at_end, monkeypatch):
    rig = make_rig(num_ranks=NUM_RANKS)
    rig.session.memory_only = True
    monkeypatch.setattr("lmcache_client.vllm.blend.scheduler.MAX_FAILURES", 1000)
    for number in (1, 2, 3):
        rig.store_rows(document(number))
    world = World(rig, seed)
    actions = [world.arrive, *[world.schedule] * 3, *[world.step] * 3, *[world.work] * 3]
    for _ in range(300):
        rare = [world.finish, world.preempt, world.reset, world.forget]
        world.random.choice(actions if world.random.random() < 0.9 else rare)()
    if is_offline_at_end:
        world.go_offline()
    world.end()
    assert world.num_ended, "nothing was loaded"
    assert rig.scheduler._jobs == {}
    assert rig.scheduler._asked == {}
    assert rig.scheduler._open_loads.loads == {}
    if is_offline_at_end:
        rig.lookups._thread.join(60)
    else:
        rig.drain_lookups()
    assert rig.session.leased == set()
