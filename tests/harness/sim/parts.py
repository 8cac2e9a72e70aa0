"""Messages between the parts of a simulated engine, and a clock that passes in steps.

A message crosses processes by pickle, as in vLLM. Tests let the answers of a part be late or lost. vLLM loses
no message, so everything else arrives with the output of its step.
"""

import copy
import pickle
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from lmcache_client.core.jobs import LoadJob, StepMeta, WorkerReport
from lmcache_client.core.lookups import LookupThread
from lmcache_client.core.parts import PartAnswer, PartedReport, PartedStep
from lmcache_client.core.requests import RequestState
from lmcache_client.core.tracing import LOWER_TIERS, Tracer
from lmcache_client.vllm.scheduler import VLLMScheduler
from tests.harness.sim.rank import SimRank, Step

T = TypeVar("T")

STEP_SECONDS = 0.02
IDLE_SECONDS = 0.001
MAX_WAIT_SECONDS, MAX_WAIT_OUTPUTS, MAX_WAITS = 0.2, 3, 2
"""A request waits for an answer of a part until both have passed, at most this number of times."""


def carried(message: T) -> T:
    """Return the message as another process receives it."""
    received: T = pickle.loads(pickle.dumps(message))
    return received


@dataclass
class StepClock:
    """Time that passes in steps of the engine only, and the outputs so far."""

    now: float = 0.0
    num_outputs: int = 0

    def __call__(self) -> float:
        return self.now


class PartLink:
    """Messages to and from the ranks of one part. Checks that each load and each hold is reported once."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self.num_late_outputs = 0
        """Outputs by which answers are late."""
        self.is_silent = False
        """True while answers are lost."""
        self.relay_bytes = 0
        """Largest size of the relays in one message."""
        self.open: Counter[str] = Counter()
        """Loads and holds that ranks have not reported."""
        self.probing: set[str] = set()
        """Requests for which the part's sidecar may still find more rows, as the part answered."""
        self._report = report
        self._late: deque[dict[str, dict[int, PartAnswer]]] = deque()

    def execute(self, rank: SimRank, step: Step) -> ModelRunnerOutput:
        """Run a step on a rank of this part."""
        output = copy.copy(step.output)
        output.kv_connector_metadata = meta = carried(step.output.kv_connector_metadata)
        if isinstance(meta, StepMeta):
            self.open.update(f"load of {job.request_id} by {rank.place}" for job in meta.loads)
            self.open.update(f"hold of {name} by {rank.place}" for name in meta.held)
        if isinstance(meta, PartedStep):
            self.relay_bytes = max(self.relay_bytes, len(pickle.dumps((meta.relays, meta.salts))))
        ran = copy.copy(rank.execute(replace(step, output=output)))
        ran.kv_connector_output = done = carried(ran.kv_connector_output) or KVConnectorOutput()
        for what, names in ("load", done.finished_recving), ("hold", done.finished_sending):
            self._end({f"{what} of {name} by {rank.place}" for name in names or ()})
        if getattr(rank.worker._worker.identity, "is_speaker", False):
            done.kv_connector_worker_meta = self._delayed(done.kv_connector_worker_meta)
        return ran

    def _end(self, names: set[str]) -> None:
        self.open.subtract(names)
        for name in names:
            if self.open[name] < 0:
                self._report(f"{name} was reported once too often")
        self.open = +self.open

    def _delayed(self, report: WorkerReport | None) -> WorkerReport | None:
        """Replace the answers of a report by those that arrive with this output."""
        answers = report.answers if isinstance(report, PartedReport) else {}
        self._late.append({} if self.is_silent else answers)
        arrived: dict[str, dict[int, PartAnswer]] = {}
        while len(self._late) > self.num_late_outputs:
            for name, late in self._late.popleft().items():
                arrived.setdefault(name, {}).update(late)
                self.probing.discard(name)
                self.probing.update({name} if any(answer.is_probing for answer in late.values()) else ())
        if isinstance(report, PartedReport):
            return replace(report, answers=arrived)
        return (report or WorkerReport()).aggregate(PartedReport(answers=arrived)) if arrived else report


class PartWaits(Tracer):
    """Checks how long requests wait for parts in total, without other time in vLLM's queue.

    All tiers are in memory. So a request that waits for lower tiers waits for a part, unless a sidecar
    verifies rows after a restart.
    """

    def __init__(
        self,
        side: VLLMScheduler,
        links: Sequence[PartLink],
        clock: StepClock,
        report: Callable[[str], None],
    ) -> None:
        self.waited: dict[str, tuple[float, int]] = {}
        """Seconds and outputs for which each request has waited since it began or restarted."""
        self.num_loads = 0
        self._side, self._links, self._clock, self._report = side, links, clock, report
        self._held: dict[str, tuple[float, int]] = {}  # request -> when it was last held

    def begin(self, state: RequestState) -> None:
        self._held.pop(state.ticket.request_id, None)
        self.waited.pop(state.ticket.request_id, None)

    def begin_load(self, job: LoadJob, num_tokens: int) -> None:
        self.num_loads += 1

    def resume(self, request_id: str) -> None:
        self._held.pop(request_id, None)

    def hold(self, request_id: str, reason: str) -> None:
        lookups, ticket = self._side._lookups, self._side._states[request_id].ticket
        is_verifying = not LookupThread.knows_all(lookups, ticket)
        if reason != LOWER_TIERS or is_verifying or any(request_id in link.probing for link in self._links):
            self.resume(request_id)
            return
        now, num_outputs = self._clock.now, self._clock.num_outputs
        last_at, last_outputs = self._held.get(request_id, (now, num_outputs))
        if num_outputs - last_outputs > 2:  # vLLM did not ask in each step: all its slots were taken
            last_at, last_outputs = now, num_outputs
        seconds, outputs = self.waited.get(request_id, (0.0, 0))
        seconds, outputs = seconds + now - last_at, outputs + num_outputs - last_outputs
        self._held[request_id], self.waited[request_id] = (now, num_outputs), (seconds, outputs)
        # A wait is counted from the message of the step in which it began, and rows may become unknown again.
        if (
            seconds > MAX_WAITS * MAX_WAIT_SECONDS + STEP_SECONDS
            and outputs > MAX_WAITS * MAX_WAIT_OUTPUTS + 1
        ):
            self._report(f"{request_id} waited for a part for {seconds:.2f} s and {outputs} outputs")
