"""An engine of one or two parts that replays requests on real memory tiers.

The scheduler side, the speaker, their messages and the tiers are those of the connector. The engine computes
and loads in steps, and copies no bytes. The order of all calls is fixed.
"""

from __future__ import annotations

import itertools
import pickle
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from lmcache_client.core.hits import KeyWords, words_of
from lmcache_client.core.jobs import EngineIdentity, StepMeta, StoreJob, WorkerReport
from lmcache_client.core.lookups import LookupThread
from lmcache_client.core.part_speaker import PartSpeaker
from lmcache_client.core.parts import PartedIdentity, PartedReport, PartedStep, PartNames, part_namespace
from lmcache_client.core.scheduler import SchedulerSide
from lmcache_client.core.tracing import LOWER_TIERS, Tracer
from lmcache_client.rpc.hello import ClientHello, Role
from lmcache_store.kv_groups import KVGroup
from lmcache_store.tiers.base import ROW_KEY_BYTES
from lmcache_store.tiers.memory.contracts import Chains, Found, Geometry, Located, LookupResult, Slot
from lmcache_store.tiers.memory.private import PrivateArena
from lmcache_store.tiers.memory.tier import MemoryTier
from testing.workloads.requests import TOKENS, Workload

ROW_BYTES = 4096
GROUP = KVGroup(0, TOKENS, ROW_BYTES)
NAMESPACE, WORKER = b"n" * 32, b"w" * 16
HELLO = ClientHello(Role.WORKER, WORKER, NAMESPACE, TOKENS, (GROUP,), model="model")
MAX_RUNNING, MAX_STEP_TOKENS, DECODE_STEPS, STEP_SECONDS = 16, 16_384, 8, 0.05
PATIENCE = 1_000
"""Steps without progress after which the replay has failed."""


@dataclass
class Prompt:
    """A request, as the scheduler side sees it."""

    request_id: str
    block_hashes: list[bytes]
    num_tokens: int
    num_computed_tokens: int = 0
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool = False
    steps_left: int = DECODE_STEPS
    is_loading: bool = False
    is_running: bool = False
    has_failed: bool = False
    """True if a load of it failed."""

    @property
    def tables(self) -> list[list[int]]:
        """Blocks of the request. No bytes are copied, so requests share them."""
        return [list(range(1, len(self.block_hashes) + 2))]


class Tier:
    """The memory tier of a part, with the client's and the session's methods that the connector calls."""

    memory_only, epoch = True, 1

    def __init__(self, num_rows: int) -> None:
        self.memory = MemoryTier(PrivateArena(Geometry(ROW_BYTES, 1), num_rows))
        self.memory.release_adopted()
        self.session = self.index = self

    def find_each(self, words: KeyWords) -> Located:
        """Like ``MappedIndex.find_each``."""
        slots = [self.memory.resident_slot(key) for key in _split(words.tobytes())]
        rows, generations = zip(*((slot or Slot(0, 0)) for slot in slots), strict=True) if slots else ((), ())
        is_there = np.array([slot is not None for slot in slots], np.bool_)
        return Located(is_there, np.array(rows, np.int64), np.array(generations, np.uint64))

    def find(self, words: KeyWords) -> Found:
        """Like ``MappedIndex.find``."""
        is_there, rows, generations = self.find_each(words)
        end = len(is_there) if is_there.all() else int(is_there.argmin())
        return Found(rows[:end], generations[:end])

    def find_few(self, keys: Iterable[bytes]) -> list[Slot]:
        """Like ``MappedIndex.find_few``."""
        return self.find(words_of(b"".join(keys))).slots()

    def lookup(
        self,
        request_id: str,
        group_keys: Sequence[tuple[int, bytes]],
        *,
        hint: bool = False,
        scheduled: Any = None,
        **_: object,
    ) -> LookupResult:
        """Like ``SidecarSession.lookup``."""
        chains = Chains(TOKENS, (GROUP,), tuple(list(_split(keys)) for _, keys in group_keys))
        if not chains.num_chunks:
            return LookupResult()
        num_found = scheduled.num_hit_chunks if scheduled is not None else None
        residency = self.memory.lookup((WORKER, request_id), chains, is_hint=hint, num_found=num_found)
        return LookupResult(residency.num_resident, residency.num_leased)

    def release(self, request_ids: Sequence[str], **_: object) -> None:
        """Like ``SidecarSession.release``."""
        for request_id in request_ids:
            self.memory.release((WORKER, request_id))

    def release_later(self, request_id: str) -> None:
        """Do nothing: no release fails."""

    def close(self) -> None:
        """Do nothing: the memory needs no release."""

    def has(self, rows: Any) -> bool:
        """Return True if these places still hold rows."""
        return all(slot.row < self.memory.arena.num_rows and self._holds(slot) for slot in rows.slots())

    def _holds(self, slot: Slot) -> bool:
        is_held = self.memory.pin(slot) is not None
        if is_held:
            self.memory.unpin(slot)
        return is_held

    def store(self, job: StoreJob) -> bool:
        """Store the rows of a job. Return True if memory has all of them now."""
        slots, keys = [], job.groups[0].keys
        for depth, key in enumerate(_split(keys), job.groups[0].first_chunk):
            reservation = self.memory.reserve(
                key, 0, WORKER, length=ROW_BYTES, depth=depth, request=job.request_id
            )
            if reservation.slot is not None:
                slots.append(reservation.slot)
        self.memory.commit(slots, 0, WORKER)
        return all(map(self.memory.is_resident, _split(keys)))


def _split(keys: bytes) -> Iterator[bytes]:
    return (keys[start : start + ROW_KEY_BYTES] for start in range(0, len(keys), ROW_KEY_BYTES))


class Calls:
    """Calls that run at once, or some steps later. Takes the place of the queue of a lookup thread."""

    def __init__(self, steps: Callable[[], int] = lambda: 0) -> None:
        """``steps`` returns how many steps later the next call runs."""
        self._steps, self._step = steps, 0
        self._waiting: dict[int, list[Callable[[], object]]] = {}

    def put(self, call: Callable[[], object]) -> None:
        """Run a call when it is due."""
        if steps := self._steps():
            self._waiting.setdefault(self._step + steps, []).append(call)
        else:
            call()

    def end_step(self) -> None:
        """Run the calls that are due in the next step."""
        self._step += 1
        for call in self._waiting.pop(self._step, ()):
            call()

    def serve(self, lookups: LookupThread) -> None:
        """Run the calls of these lookups, in place of their thread."""
        lookups.close()
        lookups._queue = cast("Any", self)


class Way(NamedTuple):
    """How the second part differs from the first one."""

    call_steps: Callable[[random.Random], int] = lambda _: 0
    """Steps by which its next call is late."""
    store_steps: Callable[[random.Random], int] = lambda _: 0
    """Steps by which its next store is late."""
    restarts: bool = False
    """True: the engine restarts after half of the requests. All tiers keep their rows."""


@dataclass
class Totals:
    """Counts of one replay."""

    rows: int = 0
    hit_rows: int = 0
    """Rows of loads that did not fail."""
    first_part_rows: int = 0
    """Rows that the first part had when the scheduler side decided what to load."""
    loads: int = 0
    failed_loads: int = 0
    requests: int = 0
    waits: list[int] = field(default_factory=list)
    """For each request that waited: its steps."""
    relay_bytes: list[int] = field(default_factory=list)
    """Pickled bytes of the relays of each step that has some."""


class Waits(Tracer):
    """Counts the steps in which each request waits for a part. All tiers are in memory."""

    def __init__(self) -> None:
        self.num_waits: dict[str, int] = {}

    def hold(self, request_id: str, reason: str) -> None:
        if reason == LOWER_TIERS:
            self.num_waits[request_id] = self.num_waits.get(request_id, 0) + 1


def of_second_part(hello: ClientHello, hash_tokens: int) -> PartedIdentity:
    """Return the identity of the second part of an engine."""
    hello = replace(hello, namespace=part_namespace(hello.namespace, 1))
    return PartedIdentity(hello, hash_tokens, part=1, is_speaker=True)


class Follower:
    """The second part: its tier, its speaker and its rank."""

    def __init__(self, num_rows: int, way: Way) -> None:
        rng = random.Random(0)
        self._tier = Tier(num_rows)
        self.identity = of_second_part(HELLO, TOKENS)
        self._names = PartNames(self.identity)
        self._calls, self._stores = Calls(lambda: way.call_steps(rng)), Calls(lambda: way.store_steps(rng))
        self.start()

    def start(self) -> None:
        """Start the rank. The tier may have rows."""
        self._speaker = PartSpeaker(cast("Any", self._tier), self.identity, self._names)
        self._calls.serve(self._speaker)
        self._report = PartedReport()

    def work(self, step: StepMeta) -> PartedReport:
        """Do the work of a step. Return the rank's report."""
        relays, salts = (step.relays, step.salts) if isinstance(step, PartedStep) else ([], {})
        self._speaker.take(relays)
        for load in step.loads:
            (group,) = load.groups
            rows = group.found
            if rows is None or len(self._names.find(self._tier.find_few, rows)) < len(rows.rows):
                self._report.failed_loads.add(load.request_id)
        for store in step.stores:
            self._stores.put(partial(self._store, self._names.store(store, salts)))
        report, self._report = self._report, PartedReport()
        report.answers = self._speaker.take_answers()
        self._calls.end_step()
        self._stores.end_step()
        return report

    def _store(self, job: StoreJob) -> None:
        if not self._tier.store(job):
            self._report.incomplete.add(job.job_id)
        self._report.stores_ended[job.job_id] += 1


class Replay:
    """One engine that serves a workload. Each step schedules at most ``MAX_STEP_TOKENS`` tokens."""

    def __init__(
        self, workload: Workload, num_rows: int, way: Way | None = None, num_engine_rows: int = 0
    ) -> None:
        """``way``: how the second part differs; None: there is no second part. ``num_engine_rows``: chunks
        that the engine itself can hold for later requests."""
        self._num_steps, self._workload, self._way = 0, workload, way
        self._in_engine: OrderedDict[bytes, None] = OrderedDict()  # chunks that the engine itself holds
        self._num_engine_rows = num_engine_rows
        self.totals, self._waits = Totals(), Waits()
        self._tier = Tier(num_rows)
        self._follower = Follower(num_rows, way) if way is not None else None
        self._running: dict[str, Prompt] = {}
        self._start()

    def _start(self) -> None:
        """Start the engine. The tiers may have rows."""
        self._in_engine.clear()
        self._side = SchedulerSide(
            lambda _: cast("Any", self._tier), lambda *_: None, clock=self._clock, tracer=self._waits
        )
        if self._follower is None:
            self._side.adopt([EngineIdentity(HELLO, TOKENS)])
        else:
            self._side.adopt([PartedIdentity(HELLO, TOKENS), self._follower.identity])
        self._lookups = cast("LookupThread", self._side._lookups)
        Calls().serve(self._lookups)

    def run(self) -> Totals:
        """Serve all requests, of which at most ``MAX_RUNNING`` run at once."""
        requests, restarts = self._workload.requests, self._way is not None and self._way.restarts
        for number, request in enumerate(requests):
            if self._follower is not None and restarts and number == len(requests) // 2:
                self._drain(0)
                self._follower.start()
                self._start()
            hashes = [key.to_bytes(32, "little") for key in request.keys]
            self._add(Prompt(f"{number}", hashes, TOKENS * len(hashes) + 1))
            self._step()
            self._drain(MAX_RUNNING - 1)
        self._drain(0)
        self.totals.waits = sorted(self._waits.num_waits.values())
        return self.totals

    def _drain(self, num_running: int) -> None:
        """Run steps until at most this many requests are left."""
        num_idle = 0
        while len(self._running) > num_running:
            num_idle = 0 if self._step() else num_idle + 1
            assert num_idle < PATIENCE, f"{len(self._running)} requests make no progress"

    def _add(self, prompt: Prompt) -> None:
        self._running[prompt.request_id] = prompt
        self._side.add(cast("Any", prompt))
        self.totals.requests += 1
        self.totals.rows += len(prompt.block_hashes)

    def _step(self) -> bool:
        """Run one step. Return True if a request made progress."""
        num_left, side = MAX_STEP_TOKENS, self._side
        for prompt in list(self._running.values()):
            if not prompt.is_running and not prompt.is_loading:
                self._begin(prompt)
            if prompt.is_running:
                num_left -= self._compute(prompt, num_left)
        meta = side.end_step(MAX_STEP_TOKENS - num_left)
        if isinstance(meta, PartedStep) and meta.relays:
            self.totals.relay_bytes.append(len(pickle.dumps((meta.relays, meta.salts))))
        report, loaded, released = self._work(pickle.loads(pickle.dumps(meta)))
        self._lookups.note_output(report)
        side.take_report(report)
        for request_id in loaded:
            side.note_loaded(request_id)
            prompt = self._running[request_id]
            prompt.has_failed = request_id in report.failed_loads
            prompt.is_loading, prompt.is_running = False, not prompt.has_failed
        for request_id in released:
            side.note_released(request_id)
        self._num_steps += 1
        return bool(loaded) or num_left < MAX_STEP_TOKENS

    def _begin(self, prompt: Prompt) -> None:
        """Start the request if the scheduler side does not hold it back."""
        num_in_engine = len(list(itertools.takewhile(self._in_engine.__contains__, prompt.block_hashes)))
        num_tokens = self._side.num_loadable(cast("Any", prompt), num_in_engine * TOKENS)
        if num_tokens is None:
            return
        if not prompt.has_failed:
            hit = LookupThread.find(self._lookups, self._side._states[prompt.request_id].ticket)
            self.totals.first_part_rows += max(0, hit.num_chunks - num_in_engine) if hit is not None else 0
        self._side.note_allocated(prompt.request_id, prompt.tables, num_tokens)
        prompt.num_computed_tokens = num_in_engine * TOKENS + num_tokens
        for block_hash in prompt.block_hashes:
            self._in_engine[block_hash] = None
            self._in_engine.move_to_end(block_hash)
        while len(self._in_engine) > self._num_engine_rows:
            self._in_engine.popitem(last=False)
        prompt.is_loading, prompt.is_running = num_tokens > 0, num_tokens == 0
        if num_tokens:
            self.totals.loads += 1

    def _compute(self, prompt: Prompt, num_left: int) -> int:
        """Compute tokens of the prompt or, after its end, one token of the answer. Return their number."""
        num_tokens = min(num_left, prompt.num_tokens - prompt.num_computed_tokens)
        if num_tokens > 0:
            prompt.num_computed_tokens += num_tokens
            num_computed = prompt.num_computed_tokens
            self._side.note_scheduled(
                prompt.request_id, lambda _: prompt.tables, num_computed, num_new_tokens=num_tokens
            )
        elif prompt.num_computed_tokens >= prompt.num_tokens:
            num_tokens, prompt.steps_left = min(1, num_left), prompt.steps_left - 1
            if not prompt.steps_left:
                self._side.finish(cast("Any", prompt), prompt.tables)
                del self._running[prompt.request_id]
        return num_tokens

    def _work(self, meta: StepMeta) -> tuple[WorkerReport, set[str], list[str]]:
        """Do the work of all ranks. Return the joined report, loaded requests, and released ones."""
        loaded = {job.request_id for job in meta.loads}
        report = WorkerReport(timed_step=meta.timed_step)
        for load in meta.loads:
            if not self._tier.has(load.groups[0].found):
                report.failed_loads.add(load.request_id)
        for store in meta.stores:
            self._tier.store(store)
            report.stores_ended[store.job_id] += 1
        if self._follower is not None:
            report = report.aggregate(self._follower.work(meta))
        self.totals.failed_loads += len(report.failed_loads)
        for load in meta.loads:
            if load.request_id not in report.failed_loads:
                self.totals.hit_rows += len(load.groups[0].blocks)
        return report, loaded, list(meta.held)

    def _clock(self) -> float:
        return self._num_steps * STEP_SECONDS
