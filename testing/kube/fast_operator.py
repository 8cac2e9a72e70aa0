"""``lmcache-operator run`` whose autoscaler's clock runs faster: a day of a workload takes minutes.

    python -m testing.kube.fast_operator ORIGIN FACTOR SCALE run ...

The clock is `testing.workloads.clock.Clock`'s. Sidecars live in real time, and have SCALE times less
memory than the operator thinks: what they say of times and of bytes is put into its world. Former shards are
read for less time by as much; a kubelet has as long as ever. All else is the operator as it is. Each decision
is a line of the log.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from lmcache_operator.__main__ import main
from lmcache_operator.autoscaling import decide as deciding
from lmcache_operator.autoscaling.state import Decision, Seen, State
from lmcache_operator.autoscaling.tier import Tier
from lmcache_operator.components.remote import remote, shards
from lmcache_operator.scaling import sizing

from testing.workloads.clock import Clock

MARK = "DECISION "
"""What a line of the log that holds a decision begins with; the rest is JSON."""


def sped_up(answer: Any, clock: Clock) -> Any:
    """An answer to ``/samples``, as if its sidecar had that clock."""
    if not isinstance(answer, dict):
        return answer
    times = {name: clock.at(answer[name]) for name in ("now", "started", "t0") if answer[name]}
    return answer | times | {"ms": [round(ms * clock.factor) for ms in answer["ms"]]}


def scaled(answer: Any, scale: int) -> Any:
    """An answer of a sidecar, as if it had that many times as many bytes of everything."""
    if isinstance(answer, dict):
        return {
            name: value * scale
            if "bytes" in name and isinstance(value, int | float)
            else scaled(value, scale)
            for name, value in answer.items()
        }
    return answer


def decide(tier: Tier, state: State, seen: Seen) -> tuple[Decision, State]:
    """The operator's own decision, told."""
    decision, after = deciding.decide(tier, state, seen)

    def hits(size: float) -> float:
        return seen.day.between(0.0, tier.effective(size, after.usable)).share

    settled = seen.settled.between(0.0, tier.effective(seen.size, after.usable)).share

    told = {
        "namespace": seen.namespace, "tier": "memory" if tier.factors else "remote", "time": seen.time,
        "size": seen.size, "next": decision.next, "target": decision.target,
        "limited_by": decision.limited_by, "reason": decision.reason, "usable": after.usable,
        "hits": hits(seen.size), "hits_next": hits(decision.next), "settled": settled,
        "settled_measured": seen.settled.measured_hits, "num_settled": seen.settled.num_accesses,
    }  # fmt: skip
    print(MARK + json.dumps(told), flush=True)
    return decision, after


def run(argv: list[str]) -> int:
    os.environ.setdefault("HOME", "/")  # as lmcache_operator.__main__ does before its imports
    from lmcache_operator import app
    from lmcache_operator.scaling.poller import Poller
    from lmcache_operator.stats import StatsClient

    clock, scale = Clock(float(argv[0]), float(argv[1])), int(argv[2])

    class Sidecars(StatsClient):
        async def read(self, address: str) -> Any:
            return scaled(await super().read(address), scale)

        async def samples(self, address: str, question: Mapping[str, int]) -> Any:
            return scaled(sped_up(await super().samples(address, question), clock), scale)

    fast = partial(Poller, clock=clock.now, poll_seconds=sizing.POLL_SECONDS / clock.factor)
    window = shards.WINDOW / clock.factor
    for module, name, value in (
        (app, "StatsClient", Sidecars), (app, "Poller", fast), (sizing, "decide", decide),
        (shards, "WINDOW", window), (remote, "WINDOW", window),
        (sizing, "_CHANGE_SECONDS", clock.factor * sizing._CHANGE_SECONDS),
    ):  # fmt: skip
        if not hasattr(module, name):
            raise RuntimeError(f"{module.__name__} has no {name} any more: what is to be faster?")
        setattr(module, name, value)
    return main(argv[3:])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
