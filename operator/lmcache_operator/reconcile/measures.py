"""Metrics from a cluster's status, for alerts and for other autoscalers."""

from __future__ import annotations

from typing import get_args

from prometheus_client import Gauge

from lmcache_operator import metrics
from lmcache_operator.policy.tier import LimitedBy
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import ClusterKey
from lmcache_store.common.units import parse_quantity

_CONDITIONS = ("Ready", "Progressing", "Degraded")
_TIERS = {"memory": metrics.MEMORY_BYTES, "remote": metrics.SHARDS}
_SIZES = ("current", "recommended")


def measure(key: ClusterKey, status: Object) -> None:
    """Set a cluster's metrics to the figures of its status. Unchanged series stay visible all the time.

    Another client may have written texts instead of figures. There are no metrics of such figures.
    """
    for condition in status.get("conditions") or ():
        if condition["type"] in _CONDITIONS:
            value = metrics.CONDITION_VALUES[condition["status"]]
            _set(metrics.CONDITION, key, (condition["type"],), value)
    try:
        _measure_sizes(key, status.get("autoscaling") or {})
    except ValueError:
        _measure_sizes(key, {})


def unmeasure(key: ClusterKey) -> None:
    """Remove the metrics of a cluster that is deleted, or that another operator serves."""
    for kind in _CONDITIONS:
        _set(metrics.CONDITION, key, (kind,), None)
    _measure_sizes(key, {})


def _measure_sizes(key: ClusterKey, scaling: Object) -> None:
    memory = scaling.get("memory") or {}
    hits = {point["size"]: float(point["hit"]) for point in memory.get("curve") or ()}
    for size in _SIZES:
        _set(metrics.PREDICTED_HITS, key, (size,), hits.get(memory.get(size)))
    for tier, gauge in _TIERS.items():
        status = scaling.get(tier) or {}
        limit = status.get("limitedBy")
        for size in _SIZES:
            _set(gauge, key, (size,), float(parse_quantity(status[size])) if size in status else None)
        saving = float((status.get("saving") or {}).get("usdPerHour", 0))
        _set(metrics.SAVING, key, (tier,), saving if limit else None)
        for value in get_args(LimitedBy):
            _set(metrics.LIMITED, key, (tier, value), 1 if value == limit else None)


def _set(gauge: Gauge, key: ClusterKey, labels: tuple[str, ...], value: float | None) -> None:
    """Set one series, or remove it if the value is None."""
    if value is None:
        gauge.remove(key.namespace, key.name, *labels)
    else:
        gauge.labels(key.namespace, key.name, *labels).set(value)
