"""Sends the requests of each workload twice, and counts what the sidecars report meanwhile."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lmcache.bench.client import REQUEST_ID, Answer, BenchError, Target, complete, get_json, model_of
from lmcache.bench.workloads import Session, Shape, sessions
from lmcache.explain import merge

COLD, WARM = "cold", "warm"
_REQUEST_SECONDS = 120.0
_SETTLE_SECONDS = 10.0
"""Time that sidecars have to count all requests, and to write rows, after a phase."""
_POLL_SECONDS = 0.1
_RECENT_SECONDS = 300.0


class Settings(NamedTuple):
    """Limits of a benchmark."""

    workloads: Sequence[str]
    shape: Shape
    """Sizes of each workload. Each is sent twice."""
    concurrency: int
    """Sessions at the same time."""
    seconds: float
    """Limit of the whole benchmark."""


@dataclass
class Phase:
    """One pass over the requests of a workload."""

    workload: str
    name: str
    """``cold``: the cache has not seen the prompts. ``warm``: it has."""
    seconds: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    cause_tokens: dict[str, int] | None = None
    """Prompt tokens by cause, as the sidecars counted them; None: they were not asked."""


@dataclass
class Run:
    """Results of a benchmark, complete or not."""

    model: str
    num_engines: int
    settings: Settings
    started: float
    """Seconds since 1970."""
    phases: list[Phase] = field(default_factory=list)
    problem: str = ""
    """Why the results are not complete; empty: they are."""


Progress = Callable[[str, int, int], None]
"""Called with a phase, the number of its finished requests, and the number of all."""


def busy_targets(targets: Sequence[Target]) -> list[str]:
    """Return a sentence for each engine that served other requests in the last minutes. Raises BenchError."""
    busy = []
    for target in targets:
        if not target.sidecar_url:
            continue
        answer = get_json(target.sidecar_url, "/requests")
        requests = answer.get("requests") if isinstance(answer, dict) else None
        since = _present_time(target.sidecar_url) - _RECENT_SECONDS
        number = sum(_is_foreign(each, since) for each in (requests if isinstance(requests, list) else ()))
        if number:
            busy.append(f"{target.name} served requests of others in the last five minutes ({number})")
    return busy


def _present_time(sidecar_url: str) -> float:
    """Return the time by the sidecar's clock, which dates the requests. Older sidecars do not report it."""
    return merge.count(merge.part(get_json(sidecar_url, "/stats")).get("time")) or time.time()


def _is_foreign(request: Any, since: float) -> bool:
    is_ours = REQUEST_ID in str(request.get("request_id")) if isinstance(request, dict) else True
    return not is_ours and merge.count(request.get("time")) > since


class Runner:
    """Runs one benchmark. ``stop`` may be called from another thread."""

    def __init__(self, targets: Sequence[Target], settings: Settings, progress: Progress) -> None:
        """Read the engine's model. Raises BenchError if the engine does not answer."""
        self._targets, self._progress = targets, progress
        model, max_tokens = model_of(targets[0].engine_url)
        shape = settings.shape
        if max_tokens:
            longest = min(shape.prompt_tokens, max_tokens - shape.output_tokens)
            settings = settings._replace(shape=shape._replace(prompt_tokens=longest))
        self.run = Run(model, len(targets), settings, time.time())
        self._deadline = time.monotonic() + settings.seconds
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    def stop(self) -> None:
        """Send no further requests."""
        self._fail("it was interrupted")

    def measure(self) -> Run:
        """Send all requests. Errors and limits end the run early, and its results say so."""
        for workload in self.run.settings.workloads:
            listed = sessions(workload, self.run.settings.shape)
            for name in (COLD, WARM):
                if not self._stop.is_set():
                    phase = Phase(workload, name)
                    self.run.phases.append(phase)
                    self._measure(phase, listed)
        return self.run

    def _measure(self, phase: Phase, listed: Sequence[Session]) -> None:
        num_requests = sum(map(len, listed))
        try:
            before = self._tokens()
            start = time.monotonic()
            with ThreadPoolExecutor(self.run.settings.concurrency, "bench") as pool:
                tasks = [
                    pool.submit(self._serve, phase, number, session, num_requests)
                    for number, session in enumerate(listed)
                ]
                try:
                    for task in tasks:
                        task.result()
                except KeyboardInterrupt:
                    self.stop()  # requests that were sent are awaited
            phase.seconds = time.monotonic() - start
            if before is not None:
                sent = sum(answer.prompt_tokens for answer in phase.answers)
                phase.cause_tokens = dict(self._settled(before, sent))
        except BenchError as error:
            self._fail(str(error))

    def _serve(self, phase: Phase, number: int, session: Session, num_requests: int) -> None:
        """Send the requests of one session, all to the same engine."""
        target = self._targets[number % len(self._targets)]
        for request in session:
            left = self._deadline - time.monotonic()
            if self._stop.is_set() or left <= 0:
                break
            request_id = f"{REQUEST_ID}-{self.run.settings.shape.seed}-{next(self._numbers)}"
            limit = min(left, _REQUEST_SECONDS)
            try:
                answer = complete(target.engine_url, self.run.model, request, request_id, limit)
            except TimeoutError:
                if limit < left:
                    self._fail(f"{target.name} did not answer a request within {_REQUEST_SECONDS:g} s")
                break
            except BenchError as error:
                self._fail(f"{target.name}: {error}")
                return
            with self._lock:
                phase.answers.append(answer)
                self._progress(f"{phase.workload} {phase.name}", len(phase.answers), num_requests)
        if time.monotonic() >= self._deadline:
            self._fail(f"the limit of {self.run.settings.seconds:g} s was reached")

    def _fail(self, problem: str) -> None:
        """Stop with a reason. The first reason counts: others follow from it."""
        with self._lock:
            self.run.problem = self.run.problem or problem
        self._stop.set()

    def _reports(self) -> list[Any]:
        return [get_json(target.sidecar_url, "/stats") for target in self._targets if target.sidecar_url]

    def _tokens(self) -> Counter[str] | None:
        reports = self._reports()
        return merge.totals(reports, "causes", "cause_tokens") if reports else None

    def _settled(self, before: Counter[str], num_sent: int) -> Counter[str]:
        """Return the tokens of this phase, once the sidecars have counted and written all of it."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while True:
            reports = self._reports()
            tokens = merge.totals(reports, "causes", "cause_tokens")
            tokens.subtract(before)
            is_written = not merge.total(reports, "num_unwritten_rows")
            if (tokens.total() >= num_sent and is_written) or time.monotonic() > deadline:
                return +tokens
            time.sleep(_POLL_SECONDS)
