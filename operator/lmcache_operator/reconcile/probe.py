"""Probes the sidecars of a cluster at each reconciliation, a few at once.

Reports come from users' pods and are not trusted: texts are cut and cleaned, and serve the status only.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from lmcache_operator.api.types import TOKEN
from lmcache_operator.contract.base import LookupFigures, Probed, RemoteFigures, Sidecar, TenantFigures
from lmcache_operator.pods.pods import is_ready, is_running
from lmcache_operator.specs import Object
from lmcache_operator.specs.names import SIDECAR
from lmcache_store.common.text import plain
from lmcache_store.tenant_names import MAX_NAMED

ReadStats = Callable[[str], Awaitable[Any]]
"""Reads /stats of the sidecar at an IP address; None if no answer arrives in about a second."""

_MAX_AT_ONCE = 16
_PROBE_SECONDS = 3.0
"""Time for all sidecars of a cluster. The next probe starts with those that this one did not reach."""
_SILENCE_SECONDS = 60.0
"""Time before a silent sidecar is probed again: unreachable pods must not slow down reconciliation."""
_SILENT = "the sidecar gives no reason"
_TENANTS_PROBLEM, _TENANTS_DIGEST = "tenants_problem", "tenants_digest"
"""Keys in the part of /stats about tenants: texts, empty without a problem and without a valid file. Sidecars
without a file have null, and those of earlier versions have no such keys."""
_MAX_COUNT = 1 << 63
# Without tenants_problem: figures in it are part of the names of Secrets.
_REASONS = "reason", "transfer_reason", "remote_reason", "disk_reason", "pin_problem", "resize_problem"


class _Last(NamedTuple):
    """The last probe of a sidecar."""

    sidecar: Sidecar | None = None
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

    def _sidecars(self, running: dict[str, Object]) -> Iterator[Sidecar]:
        for uid, pod in sorted(running.items(), key=lambda item: str(item[1]["metadata"]["name"])):
            sidecar = self._last[uid].sidecar or Sidecar(answers=False)
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
        steady: dict[str, Any] = {
            name: _steady(getattr(sidecar, name), getattr(former, name)) for name in _REASONS
        }
        sidecar = sidecar._replace(**steady)
    return _Last(sidecar, now)


def read_sidecar(stats: dict[str, Any]) -> Sidecar:
    """Parse the /stats of a sidecar. Missing or invalid values get their defaults."""
    names = "num_clients", "disk", "remote", "transfer", "lookups", "memory"
    clients, disk, remote, transfer, lookups, memory = (_part(stats, name) for name in names)
    lower = {"disk": disk, "remote": remote}
    parts = (part for part in stats.values() if isinstance(part, dict))
    tenants: dict[str, Any] = next((part for part in parts if _TENANTS_PROBLEM in part), {})
    digest = tenants.get(_TENANTS_DIGEST)
    hits = _part(lookups, "hit_tokens")
    of_tiers = (_count(hits.get(tier)) for tier in LookupFigures._fields[1:])
    num_attached = clients.get("attached")
    reason = plain(stats.get("not_ready_reason")) or _SILENT
    return Sidecar(
        reason="" if stats.get("is_ready") is True else reason,
        is_attached=isinstance(num_attached, int) and num_attached > 0,
        transfer=plain(transfer.get("mode")),
        transfer_reason=plain(transfer.get("reason")) or _SILENT,
        is_remote_reachable=_is_reachable(remote),
        remote_reason=plain(remote.get("off_reason")) or _SILENT,
        remote=RemoteFigures(*(_count(remote.get(name)) for name in RemoteFigures._fields)),
        lookups=LookupFigures(_count(lookups.get("lookup_tokens")), *of_tiers),
        is_disk_available=_is_reachable(disk),
        disk_reason=plain(disk.get("off_reason")) or _SILENT,
        encryption={tier: _encryption_problem(part) for tier, part in lower.items() if part},
        has_peers=bool(_part(stats, "peers")),
        is_memory_pinned=_is_pinned(transfer),
        pin_problem=plain(transfer.get("pin_problem")),
        # Sidecars of earlier versions report the arena's size, but can't resize.
        memory_bytes=_count(memory.get("size_bytes")) if "target_bytes" in memory else None,
        memory_target=_count(memory.get("target_bytes")),
        resize_problem=plain(memory.get("resize_problem")),
        requires_tokens=stats.get("http_authentication") == TOKEN,
        tenants_digest=plain(digest) if isinstance(digest, str) else None,
        tenants_problem=plain(tenants.get(_TENANTS_PROBLEM)),
        tenants=_tenants(tenants),
        usable_bytes=_count(memory.get("usable_bytes")),
    )


def _tenants(part: dict[str, Any]) -> dict[str, TenantFigures]:
    """Figures by the names that the sidecar reports. A valid report has at most one name per budget."""
    figures = [_part(part, name) for name in TenantFigures._fields]
    names = islice(_part(part, "bytes"), MAX_NAMED + 1)
    return {name: TenantFigures(*(_count(counts.get(name)) for counts in figures)) for name in names}


def _part(stats: dict[str, Any], name: str) -> dict[str, Any]:
    part = stats.get(name)
    return part if isinstance(part, dict) else {}


def _count(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < _MAX_COUNT else 0


def _is_reachable(tier: dict[str, Any]) -> bool | None:
    is_reachable = tier.get("is_reachable")
    return is_reachable if isinstance(is_reachable, bool) else None


def _encryption_problem(tier: dict[str, Any]) -> str | None:
    return plain(tier["encryption_problem"]) if "encryption_problem" in tier else None


def _is_pinned(transfer: dict[str, Any]) -> bool | None:
    if plain(transfer.get("pin_problem")):
        return False
    return True if any(map(_count, _part(transfer, "pinned_bytes").values())) else None


def _steady(reason: str, former: str) -> str:
    """The former reason if only its figures changed, such as free bytes, so that it is reported once."""
    return former if _without_figures(former) == _without_figures(reason) else reason


def _without_figures(reason: str) -> str:
    return re.sub(r"[0-9.]+", "", reason)
