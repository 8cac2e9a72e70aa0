"""Sidecars that report lookups in exact tiers, in the format of docs/reference/samples.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache_store.curves import HASHES, Sampler
from testing.workloads.requests import KV_BYTES_PER_TOKEN, Request, Workload
from testing.workloads.tiers import Service

NAMESPACE = "5f" * 32


@dataclass
class PodSampler:
    """Lookups and counters of one pod's sidecar."""

    clock_offset: float = 0.0
    """Seconds by which its clock is ahead."""
    sampler: Sampler = field(default_factory=Sampler)
    started: float = 0.0
    engine: int = 0
    memory: int = 0
    remote: int = 0
    """Rows that hit."""
    missed: int = 0


class Sidecars:
    """Sidecars of all pods of a service. Pods are identified by numbers."""

    def __init__(self, workload: Workload, pods: Service, num_pods: int, size_bytes: int) -> None:
        self.workload, self.pods, self.size_bytes = workload, pods, size_bytes
        self.namespace, self.load_bytes_per_second = NAMESPACE, 3e9
        self.samplers = [PodSampler() for _ in range(num_pods)]

    def serve(self, pod: int, request: Request) -> None:
        """Serve a request by a pod."""
        hits, sampler = self.pods.serve(pod, request.keys, request.time), self.samplers[pod]
        sampler.engine += hits.engine
        sampler.memory += hits.memory
        sampler.remote += hits.remote
        sampler.missed += hits.missed
        keys = b"".join(key.to_bytes(8, "big") for key in reversed(request.keys))
        sampler.sampler.record(request.time + sampler.clock_offset, keys, b"-" * len(request.keys))

    def restart(self, pod: int, time: float) -> None:
        """Restart the sidecar of a pod. Its memory tier keeps its rows."""
        offset = self.samplers[pod].clock_offset
        self.samplers[pod] = PodSampler(offset, started=time + offset)

    def samples(self, pod: int, now: float, since: int = 0, below: int = HASHES) -> dict[str, Any]:
        """The answer to ``/samples``."""
        sampler = self.samplers[pod]
        first, sampled = sampler.sampler.since(since)
        bound = min([below, sampler.sampler.bound, *(request.bound for request in sampled)])
        requests = [request.below(bound) for request in sampled]
        start = requests[0].time if requests else 0.0
        return {
            "version": 1, "now": now + sampler.clock_offset, "started": sampler.started,
            "namespace": self.namespace, "chunk_tokens": int(self.workload.tokens_per_row),
            "row_bytes": int(self.workload.row_bytes), "below": bound,
            "since": first, "next": sampler.sampler.position, "dropped": first - min(since, first),
            "t0": start, "ms": [round((request.time - start) * 1000) for request in requests],
            "num": [len(request.tiers) for request in requests],
            "key": b"".join(request.keys for request in requests).hex(),
            "tier": b"".join(request.tiers for request in requests).decode(),
        }  # fmt: skip

    def stats(self, pod: int) -> dict[str, Any]:
        """The answer to ``/stats``."""
        sampler, tokens = self.samplers[pod], int(self.workload.tokens_per_row)
        rows = {"engine": sampler.engine, "memory": sampler.memory, "remote": sampler.remote}
        shards = self.pods.remote
        # The first pod reports the transfers of all pods.
        moved = shards.num_moved if shards and not pod else 0
        remote = (
            {"written": moved, "stored": moved, "load_bytes_per_second": self.load_bytes_per_second}
            if shards
            else None
        )
        return {
            "remote": remote,
            "memory": {"size_bytes": self.size_bytes},
            "lookups": {
                "lookup_tokens": (sum(rows.values()) + sampler.missed) * tokens,
                "hit_tokens": {name: number * tokens for name, number in rows.items() if number},
                "gpus": 1, "prefill_tokens_per_second": 10_000, "kv_bytes_per_token": KV_BYTES_PER_TOKEN,
                "engine_kv_bytes": 0,
            },
        }  # fmt: skip


def keys_of(answers: Sequence[dict[str, Any]]) -> list[str]:
    """All reported keys, in order."""
    return [
        answer["key"][start : start + 16] for answer in answers for start in range(0, len(answer["key"]), 16)
    ]
