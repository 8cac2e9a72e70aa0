"""Sidecars that tell what requests looked up in exact tiers, as docs/reference/samples.md has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache.curves import HASHES, Sampler
from testing.workloads.requests import KV_BYTES_PER_TOKEN, Request, Workload
from testing.workloads.tiers import Service

NAMESPACE = "5f" * 32


@dataclass
class Told:
    """What one pod's sidecar has to tell."""

    clock_offset: float = 0.0
    """Seconds by which its clock is ahead."""
    sampler: Sampler = field(default_factory=Sampler)
    started: float = 0.0
    engine: int = 0
    memory: int = 0
    remote: int = 0
    """Rows hit."""
    missed: int = 0


class Sidecars:
    """Of all pods of a service; pods are named by numbers."""

    def __init__(self, workload: Workload, pods: Service, num_pods: int, size_bytes: int) -> None:
        self.workload, self.pods, self.size_bytes = workload, pods, size_bytes
        self.namespace, self.load_bytes_per_second = NAMESPACE, 3e9
        self.told = [Told() for _ in range(num_pods)]

    def serve(self, pod: int, request: Request) -> None:
        """A request comes to a pod."""
        hits, told = self.pods.serve(pod, request.keys, request.time), self.told[pod]
        told.engine += hits.engine
        told.memory += hits.memory
        told.remote += hits.remote
        told.missed += hits.missed
        keys = b"".join(key.to_bytes(8, "big") for key in reversed(request.keys))
        told.sampler.record(request.time + told.clock_offset, keys, b"-" * len(request.keys))

    def restart(self, pod: int, time: float) -> None:
        """Its sidecar begins anew; what is in memory stays."""
        offset = self.told[pod].clock_offset
        self.told[pod] = Told(offset, started=time + offset)

    def samples(self, pod: int, now: float, since: int = 0, below: int = HASHES) -> dict[str, Any]:
        """The answer to ``/samples``."""
        told = self.told[pod]
        first, kept = told.sampler.since(since)
        bound = min([below, told.sampler.bound, *(request.bound for request in kept)])
        requests = [request.below(bound) for request in kept]
        start = requests[0].time if requests else 0.0
        return {
            "version": 1, "now": now + told.clock_offset, "started": told.started,
            "namespace": self.namespace, "chunk_tokens": int(self.workload.tokens_per_row),
            "row_bytes": int(self.workload.row_bytes), "below": bound,
            "since": first, "next": told.sampler.position, "dropped": first - min(since, first),
            "t0": start, "ms": [round((request.time - start) * 1000) for request in requests],
            "num": [len(request.tiers) for request in requests],
            "key": b"".join(request.keys for request in requests).hex(),
            "tier": b"".join(request.tiers for request in requests).decode(),
        }  # fmt: skip

    def stats(self, pod: int) -> dict[str, Any]:
        """The answer to ``/stats``."""
        told, tokens = self.told[pod], int(self.workload.tokens_per_row)
        rows = {"engine": told.engine, "memory": told.memory, "remote": told.remote}
        shards = self.pods.remote
        # What all pods move is told by the first one.
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
                "lookup_tokens": (sum(rows.values()) + told.missed) * tokens,
                "hit_tokens": {name: number * tokens for name, number in rows.items() if number},
                "gpus": 1, "prefill_tokens_per_second": 10_000, "kv_bytes_per_token": KV_BYTES_PER_TOKEN,
                "engine_kv_bytes": 0,
            },
        }  # fmt: skip


def keys_of(answers: Sequence[dict[str, Any]]) -> list[str]:
    """All keys that were told, in order."""
    return [answer["key"][at : at + 16] for answer in answers for at in range(0, len(answer["key"]), 16)]
