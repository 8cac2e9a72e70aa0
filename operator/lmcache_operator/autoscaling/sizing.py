"""The autoscaler of one cluster: sizes of its tiers, from the answers of its sidecars. Does no I/O."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from statistics import median
from typing import Any, NamedTuple

from lmcache_operator.autoscaling.intake.lookups import Intake, PolledPod
from lmcache_operator.policy.decide import DAY_HALF_LIFE, DECIDE_SECONDS, decide, points
from lmcache_operator.policy.report import MAX_STATE_BYTES, Choice, Report, Saved, tier_status
from lmcache_operator.policy.state import Decision, Measurements, Obstacle, State
from lmcache_operator.policy.tier import Prices, Service, Tier, is_near, memory_tier, remote_tier
from lmcache_operator.policy.traffic import Traffic
from lmcache_store.common.units import format_size

POLL_SECONDS = 60.0
STALE_SECONDS = 3 * POLL_SECONDS
_CHANGE_SECONDS = 30 * 60.0
"""Deadline for the next pod to reach the chosen size. After it, the other pods cannot get the size."""
SHARD_USABLE = 0.78
"""First guess of the share of a shard's memory that holds payload. ``maxmemory`` is 80 % of the memory. At
least 96 % of ``maxmemory`` is payload (docs/reference/benchmarks.md)."""


class SizingSettings(NamedTuple):
    """Declared sizes, bounds and prices of a cluster. Sizes are bytes."""

    memory: int
    memory_bounds: tuple[int, int]
    prices: Prices
    num_parts: int = 1
    """Parts of each row, in the pods of one engine. Sizes in bytes are those of one part."""
    shards: int = 0
    """Declared number of shards; 0: no managed remote tier."""
    shard_bounds: tuple[int, int] = (0, 0)
    shard_bytes: int = 0
    is_memory_auto: bool = False
    are_shards_auto: bool = False


class UnavailableSize(NamedTuple):
    """A size of memory that a pod could not get."""

    size: int
    reason: str


class Situation(NamedTuple):
    """Present state of a cluster: its pods, its shards, and the obstacles to a change."""

    settings: SizingSettings
    pods: Mapping[str, str]
    """Names of the polled pods with a running sidecar, by uid."""
    obstacle: Obstacle | None = None
    """Obstacle to every decision."""
    refusals: tuple[UnavailableSize, ...] = ()
    unplaced: tuple[UnavailableSize, ...] = ()
    """Sizes above the declared one of pods for which no node was found."""
    largest_in_place: int = 0
    """Most bytes that every pod can get without a replacement; 0: unknown."""
    num_shards: int = 0
    """Number of shards in the list that sidecars use."""
    shards_obstacle: Obstacle | None = None

    @property
    def memory_bounds(self) -> tuple[int, int]:
        """Bounds of the choice. Running pods cannot get more than ``largest_in_place``."""
        smallest, largest = self.settings.memory_bounds
        if not (self.settings.is_memory_auto and self.largest_in_place):
            return smallest, largest
        return min(smallest, self.largest_in_place), min(largest, self.largest_in_place)

    @property
    def bounds(self) -> tuple[float, float]:
        """Range of sizes that decisions look up on the curve, in bytes.

        The range is extended to whole octaves, so that small changes of the bounds do not restart the counts.
        """
        shard_bytes = self.settings.shard_bytes
        shards = (shard_bytes * count for count in self.settings.shard_bounds if count)
        sizes = [*self.settings.memory_bounds, *shards]
        return 2.0 ** math.floor(math.log2(min(sizes))), 2.0 ** math.ceil(math.log2(max(sizes)))


@dataclass
class _TierSizing:
    """One tier: the state between its decisions, and the chosen size."""

    state: State
    chosen: Choice | None = None

    def is_verifying(self) -> bool:
        return bool(self.state.pending or (self.chosen and self.state.asked))

    def choose(self, decision: Decision, declared: int, obstacle: Obstacle | None, unit: int = 1) -> None:
        """Choose the size of the decision. While an obstacle holds a change up, the former choice stays."""
        if self.chosen and self.chosen.instead_of != declared:
            self.chosen = None
        is_held = obstacle is not None and obstacle.limited_by != "Infeasible"
        if decision.next != decision.size or (self.chosen and not is_held):
            self.chosen = Choice(round(decision.next / unit), declared)


class Sizing:
    """The autoscaler of one cluster."""

    def __init__(self, saved: Saved | None = None) -> None:
        self._memory = _TierSizing(State(), saved.memory if saved else None)
        self._remote = _TierSizing(State(usable=SHARD_USABLE), saved.shards if saved else None)
        traffic: Mapping[str, Any] = {}
        self._state_basis: object = None
        self._state_text = ""
        # State of another version is ignored: counting starts again, and the chosen sizes stay.
        with contextlib.suppress(KeyError, TypeError, ValueError, RecursionError):
            if saved and saved.state:
                state = json.loads(saved.state)
                memory, remote = (State.from_json(state[name]) for name in ("memory", "remote"))
                self._memory.state, self._remote.state, traffic = memory, remote, state["traffic"]
                self._state_text = saved.state
        self.intake = Intake(traffic)
        """Takes the answers of the sidecars."""
        self._decided = -math.inf
        self._change = (0, 0, 0.0)
        """Chosen size, number of pods that have it, and the time since which that number holds."""

    def is_due(self, now: float, situation: Situation) -> bool:
        """Whether to decide now: every 15 minutes, after a changed size, and after a refused one."""
        sizes = [
            (self._common_size(situation), self._memory.state.size),
            (situation.num_shards * situation.settings.shard_bytes, self._remote.state.size),
        ]
        is_new = any(new and old and not is_near(new, old) for new, old in sizes)
        is_new = is_new or bool(self._refusal(situation) or self._unplaced(situation))
        return is_new or not 0 <= now - self._decided < DECIDE_SECONDS

    def decide(self, now: float, situation: Situation) -> Report:
        """Decide about all tiers, and report the results."""
        settings = situation.settings
        pods = [self.intake.pods.get(uid, PolledPod()) for uid in situation.pods]
        service = self._service(pods)
        autos = settings.is_memory_auto, settings.are_shards_auto
        for tier, is_auto in zip((self._memory, self._remote), autos, strict=True):
            tier.chosen = tier.chosen if is_auto else None
            if self.intake.is_new:
                tier.state = replace(tier.state, namespace=None)
        self.intake.is_new = False
        obstacle = self._obstacle(now, situation, service)
        if unplaced := self._unplaced(situation):
            self._memory.chosen = None  # a running engine is worth more than a large cache
        self._decided = now
        status: dict[str, Any] = {
            "observedAt": datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "window": f"{DAY_HALF_LIFE / 3600:.0f}h",
            "samples": self.intake.num_samples,
        }
        if self.intake.traffic is None:
            limited_by, reason = unplaced or obstacle or Obstacle("Samples", "no lookups were counted")
            size = self._common_size(situation) or settings.memory
            status["memory"] = tier_status(Decision(size, size, size, size, reason, limited_by), ())
        else:
            status |= self._decide_memory(now, situation, service, pods, unplaced or obstacle)
            if settings.shards:
                status["remote"] = self._decide_shards(now, situation, service, pods, obstacle)
        return Report(status, self._memory.chosen, self._remote.chosen, self._state())

    def _with_lower(self, traffic: Traffic, service: Service, pods: Sequence[PolledPod]) -> Service:
        """Add the hits of lower tiers, and the mean number of pods.

        Demand is that of a day, so the price is that of the mean number of pods in a day.
        """
        remote = _median(pod.figures.remote_bytes_per_second for pod in pods)
        disk = _median(pod.figures.disk_bytes_per_second for pod in pods)
        return replace(
            service, mean_num_pods=traffic.num_pods, lower_hits=self.intake.lower.measured_hits,
            lower_worth=replace(service, load_bytes_per_second=remote or disk).worth,
        )  # fmt: skip

    def _decide_memory(
        self, now: float, situation: Situation, service: Service, pods: Sequence[PolledPod],
        obstacle: Obstacle | None,
    ) -> dict[str, Any]:  # fmt: skip
        assert self.intake.traffic is not None
        settings, sizing, size = situation.settings, self._memory, self._common_size(situation)
        service = self._with_lower(self.intake.traffic, service, pods)
        tier = memory_tier(*situation.memory_bounds, service, settings.prices)
        obstacle = obstacle or self._refusal(situation) or self._resize_obstacle(now, situation, size)
        # Memory without a price grows first: its hits reduce the value of shards, which cost money.
        if self._remote.is_verifying() and not tier.is_free:
            obstacle = obstacle or Obstacle("Verifying", "the number of shards has just changed")
        present = size or sizing.state.size or settings.memory
        measured = self.intake.traffic.memory(now, present, service, sizing.state, obstacle)
        decision, sizing.state = decide(tier, sizing.state, measured)
        if settings.is_memory_auto:
            sizing.choose(decision, settings.memory, obstacle)
        status: dict[str, Any] = {"memory": self._tier_status(tier, sizing, measured, decision, service)}
        largest = situation.memory_bounds[1]
        if decision.limited_by == "Max" and largest < settings.memory_bounds[1]:
            limit = format_size(largest)
            status["memory"]["reason"] += f"; pods must be replaced to get more than {limit}"
        num_rows = present / max(1, self.intake.row_bytes)
        status["memory"]["keysInSize"] = round(self.intake.traffic.curve.rate * num_rows)
        status["engineHit"] = f"{self.intake.engine.measured_hits:.2f}"
        if service.is_known():
            lost = tier.saved(measured.day, measured.locality_loss)
            points_lost = f"{100 * measured.locality_loss:.1f}"
            status["localityLoss"] = {"points": points_lost, "usdPerHour": f"{lost:.2f}"}
            if (age := service.break_even_seconds(settings.prices)) < math.inf:
                status["breakEvenAge"] = f"{age:.0f}s"
        return status

    def _decide_shards(
        self, now: float, situation: Situation, service: Service, pods: Sequence[PolledPod],
        obstacle: Obstacle | None,
    ) -> dict[str, Any]:  # fmt: skip
        assert self.intake.traffic is not None
        settings, sizing = situation.settings, self._remote
        day, (lowest, highest) = self.intake.traffic.curve.shared_windows[0], settings.shard_bounds
        service = replace(
            service,
            load_bytes_per_second=_median(pod.figures.remote_bytes_per_second for pod in pods),
            moved_bytes_per_second=self.intake.moved.accesses_per_hour / 3600 * settings.num_parts,
        )
        hits = day.accesses_per_hour * day.measured_hits
        tier = remote_tier(range(lowest, highest + 1), settings.shard_bytes, service, settings.prices, hits)
        obstacle = obstacle or situation.shards_obstacle
        if self._memory.is_verifying():
            obstacle = obstacle or Obstacle("Verifying", "the size of pods' memory has just changed")
        size = (situation.num_shards or settings.shards) * settings.shard_bytes
        measured = self.intake.traffic.remote(now, size, sizing.state, obstacle)
        decision, sizing.state = decide(tier, sizing.state, measured)
        if settings.are_shards_auto:
            sizing.choose(decision, settings.shards, obstacle, settings.shard_bytes)
        return self._tier_status(tier, sizing, measured, decision, service, settings)

    def _tier_status(
        self, tier: Tier, sizing: _TierSizing, measured: Measurements, decision: Decision, service: Service,
        shards: SizingSettings | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        curve = points(tier, sizing.state, measured, decision.recommended) if service.is_known() else ()
        if shards is None:
            return tier_status(decision, curve)
        whole = [point._replace(size=point.size * shards.num_parts) for point in curve]
        return tier_status(decision, whole, shards.shard_bytes)

    def _common_size(self, situation: Situation) -> int:
        """Return the size that all pods report; 0 if they differ or a pod does not report one."""
        sizes = [self.intake.pods.get(uid, PolledPod()).figures.size_bytes for uid in situation.pods]
        return sizes[0] if sizes and all(is_near(size, sizes[0]) for size in sizes) else 0

    def _unplaced(self, situation: Situation) -> Obstacle | None:
        """Return the obstacle if no node was found for a pod with the chosen size, or with less."""
        chosen, declared = self._memory.chosen, format_size(situation.settings.memory)
        for pod in situation.unplaced:
            if chosen and chosen.instead_of == situation.settings.memory and pod.size <= 1.01 * chosen.size:
                cause = f"no node had {format_size(pod.size)} of free memory for 10 minutes"
                return Obstacle("Infeasible", f"back to the declared {declared}: {cause} ({pod.reason})")
        return None

    def _refusal(self, situation: Situation) -> Obstacle | None:
        """Return the obstacle if a pod refused the chosen size. It is ignored once all pods have the size."""
        chosen, size = self._memory.chosen, self._common_size(situation)
        for refusal in situation.refusals:
            if chosen and is_near(refusal.size, chosen.size) and not is_near(size, chosen.size):
                return Obstacle("Infeasible", refusal.reason)
        return None

    def _resize_obstacle(self, now: float, situation: Situation, size: int) -> Obstacle | None:
        """Return the obstacle while pods are being resized, and if the resize makes no progress."""
        chosen, sizes = self._memory.chosen, [pod.figures.size_bytes for pod in self.intake.pods.values()]
        smallest, largest = situation.memory_bounds
        wanted = min(max(chosen.size, smallest), largest) if chosen else 0
        if chosen and chosen.instead_of == situation.settings.memory and not is_near(size, wanted):
            number = sum(is_near(present, wanted) for present in sizes)
            progress = f"{number} of {len(sizes)} pods have {format_size(wanted)}"
            if self._change[:2] != (wanted, number) or now < self._change[2]:
                self._change = wanted, number, now
            if now - self._change[2] < _CHANGE_SECONDS:
                return Obstacle("Cooldown", f"resizing pods: {progress}")
            minutes = _CHANGE_SECONDS / 60
            return Obstacle("Infeasible", f"{progress}; no other pod got it in {minutes:.0f} minutes")
        self._change = 0, 0, 0.0
        return None if size else Obstacle("Cooldown", "pods report different sizes")

    def _obstacle(self, now: float, situation: Situation, service: Service) -> Obstacle | None:
        if not situation.pods:
            return Obstacle("Samples", "no pod is running")
        pods = {name: self.intake.pods.get(uid, PolledPod()) for uid, name in situation.pods.items()}
        silent = [name for name, pod in pods.items() if not 0 <= now - pod.answered <= STALE_SECONDS]
        if silent:
            why = f"{silent[0]}: {pods[silent[0]].problem or 'no answer'}"
            return Obstacle("Samples", f"{len(silent)} of {len(pods)} pods return no usable samples ({why})")
        if lost := [name for name, pod in pods.items() if now - pod.lost <= STALE_SECONDS]:
            return Obstacle("Samples", f"samples of {lost[0]} were lost before they were read")
        if situation.obstacle:
            return situation.obstacle
        if self.intake.traffic is None:
            return None
        needed = {"gpus": service.gpus, "prefill_tokens_per_second": service.prefill_tokens_per_second}
        needed["kv_bytes_per_token"] = service.kv_bytes_per_token
        if missing := [name for name, value in needed.items() if not value]:
            return Obstacle("Samples", f"sidecars have not measured yet: {', '.join(missing)}")
        return None

    def _service(self, pods: Sequence[PolledPod]) -> Service:
        figures = [pod.figures for pod in pods]
        # The mean of the day matches the lookups that it prices: a pod's own figure moves with each step.
        latest = _median(pod.prefill_tokens_per_second for pod in figures)
        seconds_per_token = self.intake.prefill.measured_hits
        return Service(
            num_pods=len(pods),
            gpus=_median(pod.gpus for pod in figures),
            prefill_tokens_per_second=1 / seconds_per_token if seconds_per_token else latest,
            kv_bytes_per_token=_median(pod.kv_bytes_per_token for pod in figures),
            tokens_per_access=self.intake.chunk_tokens,
            engine_cache_bytes=_median(pod.engine_bytes for pod in figures),
        )

    def _state(self) -> str:
        """Return the state that must survive a restart; before the first lookup, the saved one.

        It changes only with new lookups or choices, because each change writes the ConfigMap.
        """
        basis = (self.intake.num_samples, self._memory.chosen, self._remote.chosen)
        if self.intake.traffic and basis != self._state_basis:
            states = {"memory": asdict(self._memory.state), "remote": asdict(self._remote.state)}
            text = json.dumps(states | {"traffic": self.intake.traffic.state()})
            if len(text) > MAX_STATE_BYTES:
                text = json.dumps(states | {"traffic": {}})
            self._state_basis, self._state_text = basis, text
        return self._state_text


def _median(values: Iterable[float]) -> float:
    """Return the median of the known (non-zero) values; 0 if there are none."""
    known = [value for value in values if value]
    return float(median(known)) if known else 0.0
