"""How large the tiers of one cluster should be, from what its sidecars say. Pure, but it remembers."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median
from typing import Any, NamedTuple

from lmcache_operator.autoscaling import reasons
from lmcache_operator.autoscaling.decide import DAY_HALF_LIFE, DECIDE_SECONDS, decide, is_near, points
from lmcache_operator.autoscaling.report import MAX_STATE_BYTES, Choice, Report, Saved, tier_status
from lmcache_operator.autoscaling.state import Decision, Obstacle, Seen, State
from lmcache_operator.autoscaling.tier import Prices, Service, Tier, memory_tier, remote_tier
from lmcache_operator.autoscaling.traffic import Traffic
from lmcache_operator.scaling.intake import Intake, Pod

POLL_SECONDS = 60.0
STALE_SECONDS = 3 * POLL_SECONDS
_CHANGE_SECONDS = 30 * 60.0
"""For one more pod to have the size that was chosen: after that, those it has not can't get it."""
SHARD_USABLE = 0.78
"""First guess of the share of a shard's memory that holds payload. ``maxmemory`` is 80 % of the memory, and
at least 96 % of it is payload (``python -m benchmarks shards``)."""


class Settings(NamedTuple):
    """What a user declares of a cluster; sizes in bytes."""

    memory: int
    memory_bounds: tuple[int, int]
    prices: Prices
    shards: int = 0
    """0: there is no managed remote tier."""
    shard_bounds: tuple[int, int] = (0, 0)
    shard_bytes: int = 0
    is_memory_auto: bool = False
    are_shards_auto: bool = False


class Refused(NamedTuple):
    """A size of memory that a pod could not get."""

    size: int
    reason: str


class Situation(NamedTuple):
    """What there is of a cluster now."""

    settings: Settings
    pods: Mapping[str, str]
    """Names of the pods that run a sidecar, by their uids."""
    obstacle: Obstacle | None = None
    """To any decision."""
    refusals: tuple[Refused, ...] = ()
    unplaced: tuple[Refused, ...] = ()
    """Sizes, larger than what is declared, of pods that found no node."""
    reach: int = 0
    """Bytes of memory that each pod can have before it is replaced; 0: not known."""
    num_shards: int = 0
    """As sidecars are told."""
    shards_obstacle: Obstacle | None = None

    @property
    def memory_bounds(self) -> tuple[int, int]:
        """Sizes that can be chosen: to what is beyond, no pod gets that runs now."""
        least, most = self.settings.memory_bounds
        if not (self.settings.is_memory_auto and self.reach):
            return least, most
        return min(least, self.reach), min(most, self.reach)

    @property
    def bounds(self) -> tuple[float, float]:
        """What sizes will be asked for: whole octaves, so that little changes begin nothing anew."""
        own, shards = self.settings, self.settings.shard_bytes
        sizes = [*own.memory_bounds, *(shards * count for count in own.shard_bounds if count)]
        return 2.0 ** math.floor(math.log2(min(sizes))), 2.0 ** math.ceil(math.log2(max(sizes)))


@dataclass
class _Sized:
    """One tier: what its decisions start from, and what came of them."""

    state: State
    chosen: Choice | None = None

    def is_verifying(self) -> bool:
        return bool(self.state.pending or (self.chosen and self.state.asked))

    def choose(self, decision: Decision, declared: int, held: Obstacle | None, unit: int = 1) -> None:
        """The size to go to; while something holds a change up, the one that was chosen."""
        if self.chosen and self.chosen.instead_of != declared:
            self.chosen = None
        is_held = held is not None and held.limited_by != "Infeasible"
        if decision.next != decision.size or (self.chosen and not is_held):
            self.chosen = Choice(round(decision.next / unit), declared)


class Sizing:
    """The autoscaler of one cluster."""

    def __init__(self, saved: Saved | None = None) -> None:
        self._memory = _Sized(State(), saved.memory if saved else None)
        self._remote = _Sized(State(usable=SHARD_USABLE), saved.shards if saved else None)
        traffic: Mapping[str, Any] = {}
        self._state_basis: object = None
        self._state_text = ""
        # What another version wrote is left: all begins anew, with the sizes that were chosen.
        with contextlib.suppress(KeyError, TypeError, ValueError, RecursionError):
            if saved and saved.state:
                found = json.loads(saved.state)
                memory, remote = (State.from_json(found[name]) for name in ("memory", "remote"))
                self._memory.state, self._remote.state, traffic = memory, remote, found["traffic"]
                self._state_text = saved.state
        self.intake = Intake(traffic)
        """To be given what sidecars say."""
        self._decided = -math.inf
        self._change = (0, 0, 0.0)
        """The size that pods are brought to, how many have it, and since when so many."""

    def is_due(self, now: float, situation: Situation) -> bool:
        """Whether it is time to decide: every 15 minutes, and when a size has changed."""
        sizes = [
            (self._agreed(situation), self._memory.state.size),
            (situation.num_shards * situation.settings.shard_bytes, self._remote.state.size),
        ]
        is_new = any(new and old and not is_near(new, old) for new, old in sizes)
        is_new = is_new or bool(self._refusal(situation) or self._unplaced(situation))
        return is_new or not 0 <= now - self._decided < DECIDE_SECONDS

    def decide(self, now: float, situation: Situation) -> Report:
        """What would be best now, and what to do."""
        settings, pods = situation.settings, [self.intake.pods.get(uid, Pod()) for uid in situation.pods]
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
            limited_by, reason = unplaced or obstacle or Obstacle("Samples", "nothing was looked up")
            size = self._agreed(situation) or settings.memory
            status["memory"] = tier_status(Decision(size, size, size, size, reason, limited_by), ())
        else:
            status |= self._decide_memory(now, situation, service, pods, unplaced or obstacle)
            if settings.shards:
                status["remote"] = self._decide_shards(now, situation, service, pods, obstacle)
        return Report(status, self._memory.chosen, self._remote.chosen, self._state())

    def _with_lower(self, traffic: Traffic, service: Service, pods: Sequence[Pod]) -> Service:
        """With what lower tiers have of what more memory would hit; as many pods as there were on average."""
        remote = _middle(pod.figures.remote_bytes_per_second for pod in pods)
        disk = _middle(pod.figures.disk_bytes_per_second for pod in pods)
        return replace(
            service, paid_pods=traffic.num_pods, lower_hits=self.intake.lower.measured_hits,
            lower_worth=replace(service, load_bytes_per_second=remote or disk).worth,
        )  # fmt: skip

    def _decide_memory(
        self, now: float, situation: Situation, service: Service, pods: Sequence[Pod],
        obstacle: Obstacle | None,
    ) -> dict[str, Any]:  # fmt: skip
        assert self.intake.traffic is not None
        settings, own, size = situation.settings, self._memory, self._agreed(situation)
        # Demand is that of a day, so the price is that of as many pods as there were.
        service = self._with_lower(self.intake.traffic, service, pods)
        tier = memory_tier(*situation.memory_bounds, service, settings.prices)
        held = obstacle or self._refusal(situation) or self._under_way(now, situation, size)
        # Memory that costs nothing grows first: shards, which cost money, are judged beside what it hits.
        if self._remote.is_verifying() and not tier.is_free:
            held = held or Obstacle("Verifying", "the number of shards has just changed")
        present = size or own.state.size or settings.memory
        seen = self.intake.traffic.memory(now, present, service, own.state, held)
        decision, own.state = decide(tier, own.state, seen)
        if settings.is_memory_auto:
            own.choose(decision, settings.memory, held)
        status: dict[str, Any] = {"memory": self._told(tier, own, seen, decision, service)}
        if decision.limited_by == "Max" and (most := situation.memory_bounds[1]) < settings.memory_bounds[1]:
            until = f"; more than {reasons.size_of(most)} takes a pod that is made anew"
            status["memory"]["reason"] += until
        status["memory"]["keysInSize"] = round(
            self.intake.traffic.curve.rate * present / max(1, self.intake.row_bytes)
        )
        status["engineHit"] = f"{self.intake.engine.measured_hits:.2f}"
        if service.is_known():
            lost = tier.saved(seen.day, seen.locality_loss)
            points_lost = f"{100 * seen.locality_loss:.1f}"
            status["localityLoss"] = {"points": points_lost, "usdPerHour": f"{lost:.2f}"}
            if (age := service.break_even_seconds(settings.prices)) < math.inf:
                status["breakEvenAge"] = f"{age:.0f}s"
        return status

    def _decide_shards(
        self, now: float, situation: Situation, service: Service, pods: Sequence[Pod],
        obstacle: Obstacle | None,
    ) -> dict[str, Any]:  # fmt: skip
        assert self.intake.traffic is not None
        settings, own = situation.settings, self._remote
        day, (least, most) = self.intake.traffic.curve.shared_windows[0], settings.shard_bounds
        service = replace(
            service,
            load_bytes_per_second=_middle(pod.figures.remote_bytes_per_second for pod in pods),
            moved_bytes_per_second=self.intake.moved.accesses_per_hour / 3600,
        )
        hits = day.accesses_per_hour * day.measured_hits
        tier = remote_tier(range(least, most + 1), settings.shard_bytes, service, settings.prices, hits)
        held = obstacle or situation.shards_obstacle
        if self._memory.is_verifying():
            held = held or Obstacle("Verifying", "the size of pods' memory has just changed")
        size = (situation.num_shards or settings.shards) * settings.shard_bytes
        seen = self.intake.traffic.remote(now, size, own.state, held)
        decision, own.state = decide(tier, own.state, seen)
        if settings.are_shards_auto:
            own.choose(decision, settings.shards, held, settings.shard_bytes)
        return self._told(tier, own, seen, decision, service, settings.shard_bytes)

    def _told(
        self, tier: Tier, own: _Sized, seen: Seen, decision: Decision, service: Service, unit: int = 0
    ) -> dict[str, Any]:
        curve = points(tier, own.state, seen, decision.recommended) if service.is_known() else ()
        return tier_status(decision, curve, unit)

    def _agreed(self, situation: Situation) -> int:
        """The size that all pods have; 0: they differ, or do not say."""
        sizes = [
            self.intake.pods[uid].figures.size_bytes if uid in self.intake.pods else 0
            for uid in situation.pods
        ]
        return sizes[0] if sizes and all(is_near(size, sizes[0]) for size in sizes) else 0

    def _unplaced(self, situation: Situation) -> Obstacle | None:
        """A pod that found no node, made with the size that was chosen, or with less."""
        chosen, declared = self._memory.chosen, reasons.size_of(situation.settings.memory)
        for one in situation.unplaced:
            if chosen and chosen.instead_of == situation.settings.memory and one.size <= 1.01 * chosen.size:
                found = f"{reasons.size_of(one.size)} of memory found no node for 10 minutes"
                return Obstacle("Infeasible", f"back to the declared {declared}: {found} ({one.reason})")
        return None

    def _refusal(self, situation: Situation) -> Obstacle | None:
        """Why a pod can't have the size that was chosen; one that has it could not give memory back."""
        chosen, size = self._memory.chosen, self._agreed(situation)
        for one in situation.refusals:
            if chosen and is_near(one.size, chosen.size) and not is_near(size, chosen.size):
                return Obstacle("Infeasible", one.reason)
        return None

    def _under_way(self, now: float, situation: Situation, size: int) -> Obstacle | None:
        chosen, known = self._memory.chosen, [pod.figures.size_bytes for pod in self.intake.pods.values()]
        least, most = situation.memory_bounds
        wanted = min(max(chosen.size, least), most) if chosen else 0
        if chosen and chosen.instead_of == situation.settings.memory and not is_near(size, wanted):
            number = sum(is_near(one, wanted) for one in known)
            having = f"{number} of {len(known)} pods have {reasons.size_of(wanted)}"
            if self._change[:2] != (wanted, number) or now < self._change[2]:
                self._change = wanted, number, now
            if now - self._change[2] < _CHANGE_SECONDS:
                return Obstacle("Cooldown", f"a change of size is under way: {having}")
            minutes = _CHANGE_SECONDS / 60
            return Obstacle("Infeasible", f"{having}, and for {minutes:.0f} minutes not one more")
        self._change = 0, 0, 0.0
        return None if size else Obstacle("Cooldown", "pods have several sizes")

    def _obstacle(self, now: float, situation: Situation, service: Service) -> Obstacle | None:
        if not situation.pods:
            return Obstacle("Samples", "no pod runs")
        pods = {name: self.intake.pods.get(uid, Pod()) for uid, name in situation.pods.items()}
        silent = [name for name, pod in pods.items() if not 0 <= now - pod.answered <= STALE_SECONDS]
        if silent:
            why = f"{silent[0]}: {pods[silent[0]].problem or 'no answer'}"
            return Obstacle("Samples", f"{len(silent)} of {len(pods)} pods say nothing of use ({why})")
        if lost := [name for name, pod in pods.items() if now - pod.lost <= STALE_SECONDS]:
            return Obstacle("Samples", f"samples of {lost[0]} were lost before they were read")
        if situation.obstacle:
            return situation.obstacle
        if self.intake.traffic is None:
            return None
        needed = {"gpus": service.gpus, "prefill_tokens_per_second": service.prefill_tokens_per_second}
        needed["kv_bytes_per_token"] = service.kv_bytes_per_token
        if missing := [name for name, value in needed.items() if not value]:
            return Obstacle("Samples", f"sidecars do not know yet: {', '.join(missing)}")
        return None

    def _service(self, pods: Sequence[Pod]) -> Service:
        figures = [pod.figures for pod in pods]
        # Of the day, as the lookups are whose price it is: what a pod measures moves with each step.
        now = _middle(one.prefill_tokens_per_second for one in figures)
        seconds_per_token = self.intake.prefill.measured_hits
        return Service(
            num_pods=len(pods),
            gpus=_middle(one.gpus for one in figures),
            prefill_tokens_per_second=1 / seconds_per_token if seconds_per_token else now,
            kv_bytes_per_token=_middle(one.kv_bytes_per_token for one in figures),
            tokens_per_access=self.intake.chunk_tokens,
            engine_cache_bytes=_middle(one.engine_bytes for one in figures),
        )

    def _state(self) -> str:
        """The same as long as nothing is looked up, or chosen: it is written where it is another. Until
        anything was looked up, what was saved."""
        basis = (self.intake.num_samples, self._memory.chosen, self._remote.chosen)
        if self.intake.traffic and basis != self._state_basis:
            found = {"memory": self._memory.state.as_json(), "remote": self._remote.state.as_json()}
            text = json.dumps(found | {"traffic": self.intake.traffic.state()})
            if len(text) > MAX_STATE_BYTES:
                text = json.dumps(found | {"traffic": {}})
            self._state_basis, self._state_text = basis, text
        return self._state_text


def _middle(values: Iterable[float]) -> float:
    """Of pods that know it; 0: none does."""
    known = [value for value in values if value]
    return float(median(known)) if known else 0.0
