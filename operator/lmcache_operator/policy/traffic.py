"""Miss-ratio curves of a cluster's lookups, and the hits measured for the same lookups. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmcache_operator.policy.decide import DAY_HALF_LIFE, FAST_HALF_LIFE
from lmcache_operator.policy.state import Measurements, Obstacle, State
from lmcache_operator.policy.tier import Service
from lmcache_store.curves import MissRatioCurve, Window

_MIN_USABLE = 0.45  # the smallest share of a size that decisions look up on the curve
_DAY, _FAST, _SETTLED = range(3)


class Traffic:
    """Lookups of one namespace. Keys of other namespaces say nothing about these."""

    def __init__(
        self, namespace: str, smallest: float, largest: float, *, rate: float = 1.0, max_keys: int = 16_000
    ) -> None:
        """Start with no lookups.

        Args:
            smallest, largest: range of sizes that decisions will ask for, in bytes.
            rate: share of the keys to track.
            max_keys: bound of the tracked keys.
        """
        self.namespace, self.bounds = namespace, (smallest, largest)
        self.curve = MissRatioCurve(
            max_keys, rate=rate, half_lives=(DAY_HALF_LIFE, FAST_HALF_LIFE, FAST_HALF_LIFE),
            smallest_bytes=_MIN_USABLE * smallest, largest_bytes=2 * largest, shared=True,
        )  # fmt: skip
        """Curve of the sampled lookups. The caller feeds those of all pods by time; streams are pods."""
        self._miss_bytes = Window(FAST_HALF_LIFE, 1.0, 2.0)
        self._pods = Window(DAY_HALF_LIFE, 1.0, 2.0)

    @property
    def num_pods(self) -> float:
        """Mean number of pods while the lookups were counted; 0: nothing was counted."""
        return self._pods.accesses_per_hour

    def count(
        self, time: float, seconds: float, accesses: float, hits: float,
        shared_hits: float = 0.0, miss_bytes: float = 0.0, num_pods: float = 0.0,
    ) -> None:  # fmt: skip
        """Add the pods' own counts of the ``seconds`` before ``time``.

        Args:
            hits: accesses found in the engine's cache or in the pod's own memory.
            shared_hits: accesses found only in the shared tier.
        """
        for window in (*self.curve.windows, *self.curve.pooled_windows):
            window.count(time, accesses, hits, seconds)
        for window in self.curve.shared_windows:
            window.count(time, accesses, shared_hits, seconds)
        self._miss_bytes.count(time, miss_bytes, 0.0, seconds)
        self._pods.count(time, num_pods * seconds / 3600, 0.0, seconds)

    def memory(
        self, time: float, size: float, service: Service, state: State, obstacle: Obstacle | None = None
    ) -> Measurements:
        """Return the measurements for a decision about the pods' memory."""
        pod_bytes = self.curve.stream_cache_bytes = max(state.usable * size, service.engine_cache_bytes)
        copies = service.mean_num_pods or service.num_pods
        alone = self.curve.windows[_DAY].between(0.0, pod_bytes).share
        loss = sum(w.between(0.0, copies * pod_bytes).share - alone for w in self.curve.pooled_windows)
        return self._measurements(self.curve.windows, time, size, state, copies, loss, obstacle)

    def remote(
        self, time: float, size: float, state: State, obstacle: Obstacle | None = None
    ) -> Measurements:
        """Return the measurements for a decision about the remote tier."""
        return self._measurements(self.curve.shared_windows, time, size, state, 1, 0.0, obstacle)

    def _measurements(
        self, windows: list[Window], time: float, size: float, state: State, copies: float,
        loss: float, obstacle: Obstacle | None,
    ) -> Measurements:  # fmt: skip
        settled = windows[_SETTLED]
        if settled.begin != state.filled:
            settled.restart(state.filled)
        return Measurements(
            time=time, namespace=self.namespace, size=size,
            fast=windows[_FAST], day=windows[_DAY], settled=settled,
            new_bytes=self.curve.new_bytes / max(1, copies),
            miss_bytes_per_second=self._miss_bytes.accesses_per_hour / 3600 / max(1, copies),
            locality_loss=loss, obstacle=obstacle,
        )  # fmt: skip

    def _days(self) -> list[Window]:
        curve = self.curve
        return [curve.windows[_DAY], *curve.shared_windows[_DAY : _DAY + 1], *curve.pooled_windows]

    def state(self) -> dict[str, Any]:
        """Return the counts that must survive a restart (half-life of a day), as plain values.

        Those with a half-life of an hour are soon complete again.
        """
        days = [window.state() for window in self._days()]
        pods = self._pods.state()
        return {
            "namespace": self.namespace, "new_bytes": self.curve.new_bytes, "days": days, "pods": pods
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of ``state()``. Raises ValueError for another namespace or form."""
        try:
            if state["namespace"] != self.namespace:
                raise ValueError(f"saved for namespace {state['namespace']!r}, not {self.namespace!r}")
            for window, values in zip(self._days(), state["days"], strict=True):
                window.restore(values)
            self._pods.restore(state["pods"])
            self.curve.new_bytes = float(state["new_bytes"])
            self.curve.counts_from = max(float(values["latest"]) for values in state["days"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"saved traffic is invalid: {error!r}") from error
