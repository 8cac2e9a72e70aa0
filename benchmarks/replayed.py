"""Tiers that are sized in a replay: what is declared of them, and what sizes that never change are worth.

A trace is an hour of conversations. A tenth of its sessions is repeated hour after hour, with other keys each
time: traffic that goes on as it was, which is what a prediction is about.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

from lmcache_operator.autoscaling.tier import GIB, Prices
from lmcache_operator.components.remote.pod import store_bytes

from benchmarks.sizing import TRACES
from lmcache.units import format_size
from testing.kube.api import Object
from testing.workloads.closed_loop import Routing, Setup, scattered, sticky
from testing.workloads.replay import Served
from testing.workloads.requests import HOUR, mooncake, repeated
from testing.workloads.tiers import Hits, Service, Shards

NUM_PODS, SHARE = 2, 0.1
_REDIS_BYTES, _ENTRY_BYTES = 1 << 20, 1536
"""Bytes that an empty server uses, and bytes per row in addition to its payload. ``test_remote_rows``
measures the latter."""


class SizedTier(ABC):
    """One that Auto sizes, and all that stays as it is."""

    name: ClassVar[str]
    """As the operator calls it."""
    row_bytes: ClassVar[int]
    """Of a real sidecar."""
    scale: ClassVar[int]
    """Factor between a real size and the size that the operator sees. It sees rows of 64 MiB, as an 8B model
    has with chunks of 512 tokens."""
    usd_per_gib_hour: ClassVar[float]
    bounds_gib: ClassVar[tuple[float, float]] = (16.0, 512.0)
    """Of a pod's memory."""

    def __init__(self, hours: int) -> None:
        trace = mooncake(TRACES / "mooncake_conversation_trace.jsonl.gz", share=SHARE)
        self.workload = repeated(trace, hours)
        prices = Prices(2.50, self.usd_per_gib_hour, self.usd_per_gib_hour)
        self.setup = Setup(self.workload, NUM_PODS, self.route(), bounds=self.bounds_gib, prices=prices)
        self._served: dict[float, list[Served]] = {}

    @abstractmethod
    def route(self) -> Callable[[int], Routing]:
        """Which pods requests go to."""

    @cached_property
    @abstractmethod
    def best(self) -> float:
        """The size that never changes and is worth most."""

    @abstractmethod
    def starts(self) -> list[float]:
        """Sizes to begin with."""

    @abstractmethod
    def net(self, size: float) -> float:
        """What a size that never changes is worth, in USD per hour."""

    @abstractmethod
    def declared(self, start: float) -> Object:
        """The part of a spec."""

    @abstractmethod
    def described(self, size: float) -> str:
        """A size, for people."""

    @abstractmethod
    def hits(self, served: Served) -> int:
        """Of the tier's own."""

    @abstractmethod
    def pods(self, size: float) -> Service:
        """Exact tiers."""

    def served(self, size: float) -> list[Served]:
        """What exact tiers hit."""
        if size not in self._served:
            pods, route = self.pods(size), self.setup.route(NUM_PODS)
            found: list[tuple[float, Hits]] = [
                (one.time / HOUR, pods.serve(route(one), one.keys, one.time))
                for one in self.workload.requests
            ]
            self._served[size] = [Served(hour, sum(hits), hits.memory, hits.remote) for hour, hits in found]
        return self._served[size]

    def spec(self, start: float) -> Object:
        """Of an LMCacheCluster."""
        requests = {"requests": {"cpu": "10m", "memory": "1Mi"}}
        template = {"spec": {"containers": [{"name": "engine", "resources": requests}]}}
        prices = {"gpuHour": "2.50", "memoryGiBHour": f"{self.usd_per_gib_hour}"}
        found = self.declared(start)
        found["autoscaling"] |= {"mode": "Auto", "prices": prices}
        engine = {"replicas": NUM_PODS, "gpu": {"count": 0}, "podTemplate": template}
        return {"model": {"name": "org/model"}, "engine": engine, **found}


class MemorySize(SizedTier):
    """The memory of each pod, in bytes."""

    name, row_bytes, scale, usd_per_gib_hour = "memory", 256 << 10, 256, 0.001

    def route(self) -> Callable[[int], Routing]:
        """See ``SizedTier``."""
        return sticky

    @cached_property
    def _cost(self) -> Callable[[float], float]:
        return self.setup.constant()

    @cached_property
    def best(self) -> float:
        """See ``SizedTier``."""
        return self.setup.best_constant()[0] * GIB

    def starts(self) -> list[float]:
        """A quarter of the best, and four times as much."""
        least, most = (gib * GIB for gib in self.bounds_gib)
        quarter = round(self.best / GIB / 4) * GIB
        return [max(least, quarter), min(most, 16 * quarter)]

    def net(self, size: float) -> float:
        """See ``SizedTier``."""
        rows = sum(len(request.keys) for request in self.workload.requests) / self.workload.hours
        return rows * self.setup.usd_per_miss - self._cost(size / GIB)

    def declared(self, start: float) -> Object:
        """See ``SizedTier``."""
        least, most = (f"{gib:.0f}Gi" for gib in self.bounds_gib)
        bounds = {"minSize": least, "maxSize": most}
        return {"tiers": {"memory": {"size": f"{start:.0f}"}}, "autoscaling": {"memory": bounds}}

    def described(self, size: float) -> str:
        """See ``SizedTier``."""
        return format_size(round(size))

    def hits(self, served: Served) -> int:
        """See ``SizedTier``."""
        return served.num_hits

    def pods(self, size: float) -> Service:
        """See ``SizedTier``."""
        return Service(NUM_PODS, 0, int(size / self.scale) // self.row_bytes)


class ShardCount(SizedTier):
    """How many shards a remote tier has; requests go to any pod, and what one pod stored is another's."""

    name, row_bytes, scale, usd_per_gib_hour = "remote", 64 << 10, 1024, 0.0004
    _MOST, _MEMORY_GIB, _SHARD_GIB = 6, 32, 64

    def route(self) -> Callable[[int], Routing]:
        """See ``SizedTier``."""
        return scattered

    @cached_property
    def best(self) -> float:
        """See ``SizedTier``."""
        return max(range(1, self._MOST + 1), key=self.net)

    def starts(self) -> list[float]:
        """As few as can be, and as many."""
        return [1, self._MOST]

    def net(self, size: float) -> float:
        """See ``SizedTier``. Of no shards it is 0."""
        usd = replace(self.setup.service, load_bytes_per_second=0.0).usd_per_token(self.setup.prices)
        rows = sum(one.num_brought for one in self.served(size)) / self.workload.hours
        return rows * usd * self.workload.tokens_per_row - size * self._SHARD_GIB * self.usd_per_gib_hour

    def declared(self, start: float) -> Object:
        """See ``SizedTier``."""
        managed = {"shards": round(start), "memoryPerShard": f"{self._SHARD_GIB}Gi"}
        tiers = {"memory": {"size": f"{self._MEMORY_GIB}Gi"}, "remote": {"managed": managed}}
        return {"tiers": tiers, "autoscaling": {"remote": {"minShards": 1, "maxShards": self._MOST}}}

    def described(self, size: float) -> str:
        """See ``SizedTier``."""
        return f"{size:.0f} shard{'s'[: size != 1]}"

    def hits(self, served: Served) -> int:
        """See ``SizedTier``."""
        return served.num_brought

    def pods(self, size: float) -> Service:
        """See ``SizedTier``."""
        memory = (self._MEMORY_GIB * GIB / self.scale) // self.row_bytes
        shard = store_bytes(self._SHARD_GIB << 30) / self.scale - _REDIS_BYTES
        rows = shard // (self.row_bytes + _ENTRY_BYTES)
        return Service(NUM_PODS, 0, int(memory), Shards(round(size), int(rows)))
