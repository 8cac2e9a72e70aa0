"""Tiers for replays: their declared specs, and the net value of fixed sizes.

A trace is an hour of conversations. The workload repeats a tenth of its sessions every hour, with new keys
each time. Predictions assume such steady traffic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

from benchmarks.sizing import TRACES
from lmcache_operator.components.remote.pod import store_bytes
from lmcache_operator.policy.tier import GIB, Prices
from lmcache_store.common.units import format_size
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
    """A tier that mode Auto sizes, with its constant settings."""

    name: ClassVar[str]
    """Name of the tier in the operator."""
    row_bytes: ClassVar[int]
    """Bytes of a row in the real sidecars of the replay."""
    scale: ClassVar[int]
    """Factor between a real size and the size that the operator sees. It sees rows of 64 MiB, as an 8B model
    has with chunks of 512 tokens."""
    usd_per_gib_hour: ClassVar[float]
    bounds_gib: ClassVar[tuple[float, float]] = (16.0, 512.0)
    """Limits of a pod's memory, in GiB."""

    def __init__(self, hours: int) -> None:
        trace = mooncake(TRACES / "mooncake_conversation_trace.jsonl.gz", share=SHARE)
        self.workload = repeated(trace, hours)
        prices = Prices(2.50, self.usd_per_gib_hour, self.usd_per_gib_hour)
        self.setup = Setup(self.workload, NUM_PODS, self.route(), bounds=self.bounds_gib, prices=prices)
        self._served: dict[float, list[Served]] = {}

    @abstractmethod
    def route(self) -> Callable[[int], Routing]:
        """Return the routing of requests to pods."""

    @cached_property
    @abstractmethod
    def best(self) -> float:
        """Fixed size with the highest net value."""

    @abstractmethod
    def starts(self) -> list[float]:
        """Return the sizes at the start of the runs."""

    @abstractmethod
    def net(self, size: float) -> float:
        """Return the net value of a fixed size, in USD per hour."""

    @abstractmethod
    def declared(self, start: float) -> Object:
        """Return the tier's part of the spec."""

    @abstractmethod
    def described(self, size: float) -> str:
        """Return a readable size."""

    @abstractmethod
    def hits(self, served: Served) -> int:
        """Return the number of hits in this tier."""

    @abstractmethod
    def pods(self, size: float) -> Service:
        """Return simulated exact tiers of a size."""

    def served(self, size: float) -> list[Served]:
        """Return the hits of exact tiers of a size, per request."""
        if size not in self._served:
            pods, route = self.pods(size), self.setup.route(NUM_PODS)
            hits_by_hour: list[tuple[float, Hits]] = [
                (request.time / HOUR, pods.serve(route(request), request.keys, request.time))
                for request in self.workload.requests
            ]
            self._served[size] = [
                Served(hour, sum(hits), hits.memory, hits.remote) for hour, hits in hits_by_hour
            ]
        return self._served[size]

    def spec(self, start: float) -> Object:
        """Return the spec of an LMCacheCluster."""
        requests = {"requests": {"cpu": "10m", "memory": "1Mi"}}
        template = {"spec": {"containers": [{"name": "engine", "resources": requests}]}}
        prices = {"gpuHour": "2.50", "memoryGiBHour": f"{self.usd_per_gib_hour}"}
        part = self.declared(start)
        part["autoscaling"] |= {"mode": "Auto", "prices": prices}
        engine = {"replicas": NUM_PODS, "gpu": {"count": 0}, "podTemplate": template}
        return {"model": {"name": "org/model"}, "engine": engine, **part}


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
        """Return a quarter of the best size, and four times the best size."""
        smallest, largest = (gib * GIB for gib in self.bounds_gib)
        quarter = round(self.best / GIB / 4) * GIB
        return [max(smallest, quarter), min(largest, 16 * quarter)]

    def net(self, size: float) -> float:
        """See ``SizedTier``."""
        rows = sum(len(request.keys) for request in self.workload.requests) / self.workload.hours
        return rows * self.setup.usd_per_miss - self._cost(size / GIB)

    def declared(self, start: float) -> Object:
        """See ``SizedTier``."""
        smallest, largest = (f"{gib:.0f}Gi" for gib in self.bounds_gib)
        bounds = {"minSize": smallest, "maxSize": largest}
        return {"tiers": {"memory": {"size": f"{start:.0f}"}}, "autoscaling": {"memory": bounds}}

    def described(self, size: float) -> str:
        """See ``SizedTier``."""
        return format_size(size)

    def hits(self, served: Served) -> int:
        """See ``SizedTier``."""
        return served.num_hits

    def pods(self, size: float) -> Service:
        """See ``SizedTier``."""
        return Service(NUM_PODS, 0, int(size / self.scale) // self.row_bytes)


class ShardCount(SizedTier):
    """Number of shards of a remote tier. Requests reach any pod, so pods load rows of other pods."""

    name, row_bytes, scale, usd_per_gib_hour = "remote", 64 << 10, 1024, 0.0004
    _MAX_SHARDS, _MEMORY_GIB, _SHARD_GIB = 6, 32, 64

    def route(self) -> Callable[[int], Routing]:
        """See ``SizedTier``."""
        return scattered

    @cached_property
    def best(self) -> float:
        """See ``SizedTier``."""
        return max(range(1, self._MAX_SHARDS + 1), key=self.net)

    def starts(self) -> list[float]:
        """Return the smallest and the largest number of shards."""
        return [1, self._MAX_SHARDS]

    def net(self, size: float) -> float:
        """See ``SizedTier``. The net value of zero shards is 0."""
        usd = replace(self.setup.service, load_bytes_per_second=0.0).usd_per_token(self.setup.prices)
        rows = sum(served.num_promoted for served in self.served(size)) / self.workload.hours
        return rows * usd * self.workload.tokens_per_row - size * self._SHARD_GIB * self.usd_per_gib_hour

    def declared(self, start: float) -> Object:
        """See ``SizedTier``."""
        managed = {"shards": round(start), "memoryPerShard": f"{self._SHARD_GIB}Gi"}
        tiers = {"memory": {"size": f"{self._MEMORY_GIB}Gi"}, "remote": {"managed": managed}}
        return {"tiers": tiers, "autoscaling": {"remote": {"minShards": 1, "maxShards": self._MAX_SHARDS}}}

    def described(self, size: float) -> str:
        """See ``SizedTier``."""
        return f"{size:.0f} shard{'s'[: size != 1]}"

    def hits(self, served: Served) -> int:
        """See ``SizedTier``."""
        return served.num_promoted

    def pods(self, size: float) -> Service:
        """See ``SizedTier``."""
        memory = (self._MEMORY_GIB * GIB / self.scale) // self.row_bytes
        shard = store_bytes(self._SHARD_GIB << 30) / self.scale - _REDIS_BYTES
        rows = shard // (self.row_bytes + _ENTRY_BYTES)
        return Service(NUM_PODS, 0, int(memory), Shards(round(size), int(rows)))
