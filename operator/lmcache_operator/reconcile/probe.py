"""Probes the sidecars of a cluster at each reconciliation, a few at once.

Reports come from users' pods and are not trusted: texts are cut and cleaned, and serve the status only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lmcache_operator.components.engine.features import FEATURES, TIERS
from lmcache_operator.components.engine.features.base import count_of, part_of, reason_of, steady_texts
from lmcache_operator.contract.base import LookupFigures, Probed, SidecarState
from lmcache_operator.pods.pods import is_ready, is_running
from lmcache_operator.specs import Object
from lmcache_operator.specs.names import SIDECAR
from lmcache_store.common.text import plain

ReadStats = Callable[[str], Awaitable[Any]]
"""Reads /stats of the sidecar at an IP address; None if no answer arrives in about a second."""

_MAX_AT_ONCE = 16
_PROBE_SECONDS = 3.0
"""Time for all sidecars of a cluster. The next probe starts with those that this one did not reach."""
_SILENCE_SECONDS = 60.0
"""Time before a silent sidecar is probed again: unreachable pods must not slow down reconciliation."""
_REASONS = "reason", "attach_refusal", "transfer_reason", "resize_problem"


class _Last(NamedTuple):
    """The last probe of a sidecar."""

    sidecar: SidecarState | None = None
    time: float = float("-inf")
    num_misses: int = 0


@dataclass
class SidecarProber:
    """Probes the sidecars of one cluster, and remembers their last reports."""

    read_stats: ReadStats
    monotonic: Callable[[], float]

    def __post_init__(self) -> None:
        self._last: dict[str, _Last] = {}

    async def probe(self, pods: Sequence[Object]) -> Probed:
        """Probe the sidecars of running pods. No answer of a sidecar makes this call raise."""
        running = {pod["metadata"]["uid"]: pod for pod in pods if has_running_sidecar(pod)}
        self._last = {uid: self._last.get(uid, _Last()) for uid in running}
        now, slots = self.monotonic(), asyncio.Semaphore(_MAX_AT_ONCE)
        due = [
            uid
            for uid, last in self._last.items()
            if not last.num_misses or now - last.time > _SILENCE_SECONDS
        ]

        async def ask(uid: str) -> None:
            async with slots:
                stats = await self.read_stats(running[uid]["status"]["podIP"])
            self._last[uid] = _probed(stats, self._last[uid], now)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PROBE_SECONDS):
                await asyncio.gather(*map(ask, sorted(due, key=lambda uid: self._last[uid].time)))
        return Probed(tuple(self._sidecars(running)), all(map(_is_certain, self._last.values())))

    def _sidecars(self, running: dict[str, Object]) -> Iterator[SidecarState]:
        for uid, pod in sorted(running.items(), key=lambda item: str(item[1]["metadata"]["name"])):
            sidecar = self._last[uid].sidecar or SidecarState(answers=False)
            yield sidecar._replace(pod=str(pod["metadata"]["name"]), is_engine_ready=is_ready(pod))


def has_running_sidecar(pod: Object) -> bool:
    """Whether a pod has a running sidecar that can be probed."""
    containers = pod["spec"].get("initContainers") or ()
    return is_running(pod) and any(container["name"] == SIDECAR for container in containers)


def _is_certain(last: _Last) -> bool:
    return last.num_misses > 1 or (last.num_misses == 0 and last.sidecar is not None)


def _probed(stats: Any, last: _Last, now: float) -> _Last:
    if not isinstance(stats, dict):
        num_misses = last.num_misses + 1
        return _Last(last.sidecar if num_misses == 1 else None, now, num_misses)
    sidecar = read_sidecar(stats)
    if former := last.sidecar:
        features = {each.name: each.steady(each.report(sidecar), each.report(former)) for each in FEATURES}
        sidecar = steady_texts(sidecar, former, _REASONS)._replace(features=features)
    return _Last(sidecar, now)


def read_sidecar(stats: dict[str, Any]) -> SidecarState:
    """Parse the /stats of a sidecar. Missing or invalid values get their defaults."""
    clients, transfer, lookups, memory = (
        part_of(stats, name) for name in ("num_clients", "transfer", "lookups", "memory")
    )
    hits, tiers = part_of(lookups, "hit_tokens"), ("engine", "memory", *(tier.name for tier in TIERS))
    num_attached = clients.get("attached")
    return SidecarState(
        reason="" if stats.get("is_ready") is True else reason_of(stats, "not_ready_reason"),
        is_attached=isinstance(num_attached, int) and num_attached > 0,
        attach_refusal=plain(stats.get("attach_refusal")),
        lookups=LookupFigures(
            count_of(lookups.get("lookup_tokens")), {tier: count_of(hits.get(tier)) for tier in tiers}
        ),
        transfer=plain(transfer.get("mode")),
        transfer_reason=reason_of(transfer, "reason"),
        # Sidecars of earlier versions report the arena's size, but can't resize.
        memory_bytes=count_of(memory.get("size_bytes")) if "target_bytes" in memory else None,
        memory_target=count_of(memory.get("target_bytes")),
        resize_problem=plain(memory.get("resize_problem")),
        features={feature.name: feature.read(stats) for feature in FEATURES},
    )
