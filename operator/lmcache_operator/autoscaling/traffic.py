"""What is known of a cluster's lookups: curves, and what was measured of the same accesses. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmcache.curves import MissRatioCurve, Window
from lmcache_operator.autoscaling.decide import DAY_HALF_LIFE, FAST_HALF_LIFE
from lmcache_operator.autoscaling.state import Obstacle, Seen, State
from lmcache_operator.autoscaling.tier import Service

_USABLE_FROM = 0.45  # the smallest share of a size that is ever asked for
_DAY, _FAST, _SETTLED = range(3)


class Traffic:
    """Of one namespace: what other keys do tells nothing of these."""

    def __init__(
        self,
        namespace: str,
        smallest: float,
        largest: float,
        *,
        rate: float = 1.0,
        max_keys: int = 16_000,
        is_shared: bool = False,
    ) -> None:
        """``smallest`` and ``largest``: bytes that will be asked for. With ``is_shared``, what all pods share
        is counted as well."""
        self.namespace, self.bounds = namespace, (smallest, largest)
        self.curve = MissRatioCurve(
            max_keys, rate=rate, half_lives=(DAY_HALF_LIFE, FAST_HALF_LIFE, FAST_HALF_LIFE),
            smallest_bytes=_USABLE_FROM * smallest, largest_bytes=2 * largest, shared=is_shared,
        )  # fmt: skip
        """To be fed with the sampled lookups of all pods, in the order of their time; streams are pods."""
        self._miss_bytes = Window(FAST_HALF_LIFE, 1.0, 2.0)
        self._pods = Window(DAY_HALF_LIFE, 1.0, 2.0)

    @property
    def num_pods(self) -> float:
        """On average, as accesses are counted; 0: nothing was counted."""
        return self._pods.accesses_per_hour

    def count(
        self, time: float, seconds: float, accesses: float, hits: float,
        shared_hits: float = 0.0, miss_bytes: float = 0.0, num_pods: float = 0.0,
    ) -> None:  # fmt: skip
        """Add what ``num_pods`` counted themselves in the ``seconds`` before ``time``; ``hits``: in the
        engine's cache or in the pod's own memory, ``shared_hits``: behind both."""
        for window in (*self.curve.windows, *self.curve.pooled_windows):
            window.count(time, accesses, hits, seconds)
        for window in self.curve.shared_windows:
            window.count(time, accesses, shared_hits, seconds)
        self._miss_bytes.count(time, miss_bytes, 0.0, seconds)
        self._pods.count(time, num_pods * seconds / 3600, 0.0, seconds)

    def memory(
        self, time: float, size: float, service: Service, state: State, obstacle: Obstacle | None = None
    ) -> Seen:
        """What a decision about the pods' memory starts from; ``settled`` begins when the state says."""
        own = self.curve.own_bytes = max(state.usable * size, service.engine_cache_bytes)
        copies = service.paid_pods or service.num_pods  # while this was looked up
        loss = sum(
            window.between(0.0, copies * own).share - self.curve.windows[_DAY].between(0.0, own).share
            for window in self.curve.pooled_windows
        )
        return self._seen(self.curve.windows, time, size, state, copies, loss, obstacle)

    def remote(self, time: float, size: float, state: State, obstacle: Obstacle | None = None) -> Seen:
        """What a decision about the remote tier starts from."""
        return self._seen(self.curve.shared_windows, time, size, state, 1, 0.0, obstacle)

    def _seen(
        self, windows: list[Window], time: float, size: float, state: State, copies: float,
        loss: float, obstacle: Obstacle | None,
    ) -> Seen:  # fmt: skip
        settled = windows[_SETTLED]
        if settled.begin != state.filled:
            settled.restart(state.filled)
        return Seen(
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
        """What has to survive a restart, as plain values: the day. The last hour is soon seen again."""
        days = [window.state() for window in self._days()]
        pods = self._pods.state()
        return {
            "namespace": self.namespace, "new_bytes": self.curve.new_bytes, "days": days, "pods": pods
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state()`` returned. Raises ValueError if that can't be."""
        try:
            if state["namespace"] != self.namespace:
                raise ValueError(f"of {state['namespace']!r}, not {self.namespace!r}")
            for window, values in zip(self._days(), state["days"], strict=True):
                window.restore(values)
            self._pods.restore(state["pods"])
            self.curve.new_bytes = float(state["new_bytes"])
            self.curve.counts_from = max(float(values["latest"]) for values in state["days"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the state of what was looked up: {error}") from error
