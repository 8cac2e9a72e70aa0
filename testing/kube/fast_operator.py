"""``lmcache-operator run`` with a faster autoscaler clock: a day of a workload takes minutes.

    python -m testing.kube.fast_operator ORIGIN FACTOR SCALE run ...

The clock is `testing.workloads.clock.Clock`. Sidecars run in real time, and have 1/SCALE of the memory that
the operator assumes: their times and bytes are converted. Previous shards are read for a shorter time by
FACTOR. The kubelet's time limits stay. Everything else is the unchanged operator. Each decision is a line in
the log.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from lmcache_operator.__main__ import main
from lmcache_operator.autoscaling import sizing
from lmcache_operator.components.remote import remote, shards
from lmcache_operator.policy import decide as deciding
from lmcache_operator.policy.state import Decision, Measurements, State
from lmcache_operator.policy.tier import Tier
from testing.workloads.clock import Clock

MARK = "DECISION "
"""Start of a log line with a decision. The rest of the line is JSON."""


def convert_times(answer: Any, clock: Clock) -> Any:
    """Convert the times in an answer of ``/samples`` to this clock."""
    if not isinstance(answer, dict):
        return answer
    times = {name: clock.workload_time(answer[name]) for name in ("now", "started", "t0") if answer[name]}
    return answer | times | {"ms": [round(ms * clock.factor) for ms in answer["ms"]]}


def scale_bytes(answer: Any, scale: int) -> Any:
    """Multiply all bytes in an answer of a sidecar by ``scale``."""
    if isinstance(answer, dict):
        return {
            name: value * scale
            if "bytes" in name and isinstance(value, int | float)
            else scale_bytes(value, scale)
            for name, value in answer.items()
        }
    return answer


def decide(tier: Tier, state: State, measured: Measurements) -> tuple[Decision, State]:
    """Make the operator's own decision, and print it."""
    decision, after = deciding.decide(tier, state, measured)

    def hits(size: float) -> float:
        return measured.day.between(0.0, tier.effective(size, after.usable)).share

    settled = measured.settled.between(0.0, tier.effective(measured.size, after.usable)).share

    record = {
        "namespace": measured.namespace, "tier": "memory" if tier.factors else "remote",
        "time": measured.time, "size": measured.size, "next": decision.next, "target": decision.target,
        "limited_by": decision.limited_by, "reason": decision.reason, "usable": after.usable,
        "hits": hits(measured.size), "hits_next": hits(decision.next), "settled": settled,
        "settled_measured": measured.settled.measured_hits, "num_settled": measured.settled.num_accesses,
    }  # fmt: skip
    print(MARK + json.dumps(record), flush=True)
    return decision, after


def run(argv: list[str]) -> int:
    os.environ.setdefault("HOME", "/")  # like lmcache_operator.__main__ before its imports
    from lmcache_operator import app
    from lmcache_operator.autoscaling.poller import Poller
    from lmcache_operator.stats import StatsClient

    clock, scale = Clock(float(argv[0]), float(argv[1])), int(argv[2])

    class Sidecars(StatsClient):
        async def read(self, address: str, uid: str) -> Any:
            return scale_bytes(await super().read(address, uid), scale)

        async def samples(self, address: str, uid: str, question: Mapping[str, int]) -> Any:
            answer = await super().samples(address, uid, question)
            return scale_bytes(convert_times(answer, clock), scale)

    fast = partial(Poller, clock=clock.now, poll_seconds=sizing.POLL_SECONDS / clock.factor)
    window = shards.WINDOW / clock.factor
    for module, name, value in (
        (app, "StatsClient", Sidecars), (app, "Poller", fast), (sizing, "decide", decide),
        (shards, "WINDOW", window), (remote, "WINDOW", window),
        (sizing, "_CHANGE_SECONDS", clock.factor * sizing._CHANGE_SECONDS),
    ):  # fmt: skip
        if not hasattr(module, name):
            raise RuntimeError(f"{module.__name__} has no {name}: adapt the list of accelerated names")
        setattr(module, name, value)
    return main(argv[3:])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
