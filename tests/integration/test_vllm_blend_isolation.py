"""Blended prompts among exact ones, in vLLM's own scheduler: no exact request ever reads blended KV.

The blended KV of these engines is never right, and the simulated model checks all KV that it reads. So a
wrong read of a request that did not ask for blending, now or from a stored row, is a leak.
"""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.request import Request

from lmcache_client.core.blend_jobs import Blended
from lmcache_client.core.layout import Layout, page_views
from lmcache_client.vllm.blend import worker
from testing.deadlines import SIMULATED
from tests.harness.scope import examples
from tests.harness.sim import config
from tests.harness.sim.config import BLOCK, SimSettings
from tests.harness.sim.engine import Result, SimEngine
from tests.harness.sim.world import make_tokens, serving_world

DEADLINES = SIMULATED

pytestmark = pytest.mark.vllm

BASE = SimSettings(has_prefix_caching=True, num_blocks=96)
VARIANTS = {
    "async": replace(BASE, is_async=True, num_blocks=56, max_late_outputs=2),
    "V2 runner": replace(BASE, runner=2, has_events=True),
    "two ranks": replace(BASE, tensor_parallel=2),
    "priorities": replace(BASE, policy="priority", num_blocks=64),
}


class Executor:
    """Copies stored KV without a rotation, computes nothing, and sometimes fails."""

    def __init__(self, cache, kv_caches, chunk_tokens):
        (group,) = cache.kv_cache_groups
        self.views = page_views(group.layer_names, kv_caches, cache.num_blocks)
        per_row = chunk_tokens // BLOCK
        pages = (torch.zeros(4 * per_row, view.shape[1], dtype=torch.uint8) for view in self.views)
        self.staging = Layout(tuple(pages), per_row)

    def place(self, job, begin, end, start, slot):
        for view, staged in zip(self.views, self.staging.pages, strict=True):
            size = view.shape[1] // BLOCK
            for source, position in enumerate(range(begin, end), slot):
                target = view[job.blocks[position // BLOCK]].view(BLOCK, size)
                target[position % BLOCK] = staged[source // BLOCK].view(BLOCK, size)[source % BLOCK]

    def take(self, job, chunks, blocks):
        per_row = self.staging.blocks_per_row
        for view, staged in zip(self.views, self.staging.pages, strict=True):
            size = view.shape[1] // BLOCK
            for row, numbers in enumerate(blocks):
                tokens = view[list(numbers)].view(-1, size)[job.start % BLOCK :]
                staged[row * per_row : (row + 1) * per_row].view(-1, size)[:] = tokens[: per_row * BLOCK]

    def blend(self, job, is_placed, stored_at):
        num_left, budget = job.end - job.begin, (yield 0)
        while num_left > 0:
            computed = min(budget, num_left)
            num_left -= computed
            if computed and random.Random(f"{job.request_id} {num_left}").random() < 0.03:
                raise RuntimeError("a test: a pass failed")
            budget = yield computed
        return Blended(int(is_placed[job.begin :].sum()), 0, 0)

    def wait_for_layer_load(self, layer_name):
        """No pass runs."""


class Traffic:
    """Random requests to an engine, and what they asked for."""

    def __init__(self, engine: SimEngine, seed: str) -> None:
        self.engine, self.seed, self.random = engine, seed, random.Random(seed)
        self.documents = [make_tokens(size, f"{seed} {size}") for size in (96, 150, 200, 260)]
        self.prompts: dict[str, tuple[list[int], str | None]] = {}
        self.asked: set[str] = set()
        self.answers: dict[str, dict] = {}
        finished = engine.scheduler._connector_finished

        def record(request):
            is_held, params = finished(request)
            self.answers[request.request_id] = params or {}
            return is_held, params

        engine.scheduler._connector_finished = record

    def add(self, tokens, salt=None, params=None, max_tokens=1):
        name = f"{self.seed} {len(self.prompts)}"
        self.prompts[name] = tokens, salt
        self.engine.results[name], self.engine._contents[name] = Result(), {}
        sampling = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": params}
        )
        fields = {"cache_salt": salt, "priority": self.random.choice([0, 1])}
        self.engine.scheduler.add_request(
            Request(name, tokens, sampling, None, block_hasher=self.engine._hasher, **fields)
        )
        return name

    def arrive(self):
        salt, max_tokens = self.random.choice([None, None, "tenant"]), self.random.choice([1, 1, 3, 40])
        if self.random.random() < 0.3:
            is_document = {"lmcache": {"document": True}}
            self.add(self.random.choice(self.documents), salt, is_document, max_tokens)
            return
        documents = self.random.sample(self.documents, self.random.choice([1, 2, 3]))
        tokens = [*itertools.chain(*documents), *make_tokens(20, f"question {self.random.randrange(2)}")]
        is_blended = self.random.random() < 0.6
        params = {"lmcache": {"blend": {"documents": list(map(len, documents))}}} if is_blended else None
        name = self.add(tokens, salt, params, max_tokens)
        self.asked |= {name} if is_blended else set()

    def run(self, world, num_actions=200):
        for _ in range(num_actions):
            action = self.random.random()
            open_ones = [name for name in self.prompts if self.engine.results[name].finish_reason is None]
            if action < 0.3 and len(open_ones) < 10:
                self.arrive()
            elif action < 0.36 and open_ones:
                self.engine.abort(self.random.choice(open_ones))
            elif action < 0.4:
                self.random.choice([world.load_gate.shut, world.load_gate.open, world.load_gate.open])()
            for _ in range(self.random.randrange(5)):
                self.engine.step()
        world.open_gates()
        self.engine.run()

    def wrong(self):
        wrong, self.engine.wrong_reads = {read.rsplit(" full ")[0] for read in self.engine.wrong_reads}, []
        return wrong


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS.keys())
def test_exact_requests_never_read_blended_kv(monkeypatch, settings):
    monkeypatch.setattr(worker, "_create", lambda _, cache, chunk, kv: Executor(cache, kv, chunk))
    for name, value in {"blend": "request", "blend_min_tokens": 32}.items():
        monkeypatch.setitem(config.CONNECTOR, name, value)
    num_blended = 0
    for seed in range(examples(2)):
        with serving_world(settings) as world, world.engines(settings) as (engine,):
            side = engine.scheduler.connector._scheduler
            traffic = Traffic(engine, f"{settings.runner} {seed}")
            traffic.run(world)
            wrong = traffic.wrong()
            assert wrong <= traffic.asked, "an exact request read blended KV"
            blended = {name for name, params in traffic.answers.items() if params.get("lmcache")}
            assert wrong <= blended, "an answer does not say that it was blended"
            assert blended <= traffic.asked
            num_blended += len(wrong)
            assert not engine.leftovers()
            assert side._asked == side._jobs == side._lookups._unleased == {}
            for tokens, salt in list(traffic.prompts.values()):
                traffic.add(tokens, salt)
                engine.run()
                engine.forget()
            assert not traffic.wrong(), "blended KV was stored as exact"
            world.sidecar.wait_until(lambda stats: not stats["memory"]["leased_rows"])
    assert num_blended, "nothing was blended"
