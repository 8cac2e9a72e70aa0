"""A cluster with figures, Events and a past, as the command ``report`` gathers them."""

import math
from typing import Any

from lmcache_operator.commands.gather import Gathered, PodFigures
from lmcache_operator.commands.reports.facts import Facts
from lmcache_operator.commands.reports.history import History

NOW = 1_795_000_000.0
CAUSES = {
    "engine": 180_000, "memory": 420_000, "remote": 96_000, "new": 70_000, "diverged": 150_000,
    "evicted": 60_000, "too_late": 12_000, "tail": 12_000,
}  # fmt: skip


def stats(**changes: Any) -> dict[str, Any]:
    """An answer of a sidecar to /stats."""
    return {
        "version": "0.1.0", "is_ready": True, "uptime_seconds": 86_400.0, "num_clients": {"attached": 2},
        "memory": {"size_bytes": 64 << 30, "used_bytes": 61 << 30},
        "remote": {"used_bytes": 40 << 30, "is_reachable": True},
        "lookups": {"engine_kv_bytes": 20 << 30},
        "causes": {
            "prompt_tokens": sum(CAUSES.values()), "cause_tokens": CAUSES,
            "diverged_requests": {"64": 90}, "diverged_tokens": {"64": 150_000}, "branches": [],
        },
        "benefit": {
            "saved_gpu_seconds": 36_000.0, "saved_prefill_seconds": {"memory": 30_000.0, "remote": 6_000.0},
            "tier_byte_seconds": {"memory": 64.0 * 2**30 * 86_400}, "unrated_tokens": {"memory": 12},
            "first_tokens": {"2048": {"tier": {"0.125": 400}, "none": {"1": 100}}},
        },
        **changes,
    }  # fmt: skip


def pod(name: str, **figures: Any) -> PodFigures:
    """A running pod, with the answer of its sidecar."""
    containers = [{"name": "engine", "image": "vllm/vllm-openai:v0.33.0"}]
    sidecar = {"name": "sidecar", "image": "ghcr.io/lmcache-cluster/sidecar:0.1.0"}
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    resource = {
        "metadata": {"name": name, "namespace": "team", "uid": name},
        "spec": {"containers": containers, "initContainers": [sidecar]},
        "status": status,
    }
    return PodFigures(resource, **({"stats": stats()} | figures))


def _point(size: str, hit: float, net: float) -> dict[str, str]:
    low, high = f"{hit - 0.02:.3f}", f"{hit + 0.02:.3f}"
    return {"size": size, "hit": f"{hit:.3f}", "low": low, "high": high, "netPerHour": f"{net:.3f}"}


REASON = "128Gi per pod instead of 64Gi: 9.1 percentage points more hits are worth 0.51 USD/h of GPU time."
CURVE = [
    _point(f"{2**power}Gi", 0.66 * (1 - math.exp(-(2**power) / 90)), net)
    for power, net in ((4, -1.2), (5, -0.8), (6, 0.0), (7, 0.31), (8, 0.12), (9, -0.6))
]


def cluster() -> dict[str, Any]:
    """The LMCacheCluster."""
    memory = {
        "current": "64Gi", "recommended": "128Gi", "next": "64Gi", "reason": REASON, "limitedBy": "MaxSize",
        "saving": {"usdPerHour": "0.310", "low": "0.250", "high": "0.370"}, "curve": CURVE,
    }  # fmt: skip
    return {
        "apiVersion": "lmcache.io/v1alpha1",
        "kind": "LMCacheCluster",
        "metadata": {"name": "qwen3-8b", "namespace": "team", "uid": "u"},
        "spec": {
            "model": {"name": "Qwen/Qwen3-8B"},
            "engine": {},
            "tiers": {"memory": {"size": "64Gi"}, "remote": {"external": {"url": "redis://redis:6379"}}},
        },
        "status": {
            "conditions": [
                {"type": "Ready", "status": "True", "reason": "Ready", "message": "3 of 3 pods."},
                {
                    "type": "Degraded",
                    "status": "True",
                    "reason": "RemoteTierSlow",
                    "message": "Redis is slow.",
                },
            ],
            "autoscaling": {
                "observedAt": "2026-11-18T10:00:00Z", "samples": 412_334, "window": "24h", "memory": memory,
            },
        },
    }  # fmt: skip


def event(reason: str, message: str, time: str = "2026-11-18T09:30:00Z", count: int = 1) -> dict[str, Any]:
    """An Event about the cluster."""
    return {"reason": reason, "message": message, "lastTimestamp": time, "count": count}


def history() -> History:
    """A day with an hour without data."""
    times = [NOW - 86_400 + 360 * number for number in range(241)]

    def wave(mean: float, shift: float = 0.0) -> list[float]:
        hours = ((time - times[0]) / 3600 for time in times)
        return [
            math.nan if 14 <= hour < 15 else mean * (1 + 0.6 * math.sin(hour / 3.8 + shift)) for hour in hours
        ]

    tokens = {cause: wave(number / 40, number) for cause, number in CAUSES.items()}
    used = {"memory": [min(180.0, 8.0 * number) * 2**30 for number in range(241)], "remote": wave(40 * 2**30)}
    return History(times, tokens, used, {"memory": [192.0 * 2**30] * 241})


def facts(**changes: Any) -> Facts:
    """Everything that a report shows. ``changes`` replace fields."""
    figures = (
        pod("qwen3-8b-engine-0"),
        pod("qwen3-8b-engine-1"),
        pod("qwen3-8b-engine-2", stats={}, problem="no answer within 3 s"),
    )
    events = [
        event("MemoryRecommended", REASON),
        event("PodsReplaced", "Replaced 3 pods.", "2026-11-17T22:00:00Z", 3),
    ]
    values: dict[str, Any] = {
        "gathered": Gathered(cluster(), figures, (), NOW), "events": events, "history": history(),
        "since": "24h", "version": "0.1.0",
    }  # fmt: skip
    return Facts(**(values | changes))
