"""Figures of a cluster's status that are metrics, too, for alerts and for those who scale by them."""

from __future__ import annotations

from typing import get_args

from prometheus_client import Gauge

from lmcache.units import parse_quantity
from lmcache_operator import metrics
from lmcache_operator.autoscaling.tier import LimitedBy
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import ClusterKey

_CONDITIONS = ("Ready", "Degraded")
_TIERS = {"memory": metrics.MEMORY_BYTES, "remote": metrics.SHARDS}
_SIZES = ("current", "recommended")


def measure(key: ClusterKey, status: Object) -> None:
    """As the status has them now; what is as it was is never missing for a moment."""
    for condition in status.get("conditions") or ():
        if condition["type"] in _CONDITIONS:
            value = metrics.CONDITION_VALUES[condition["status"]]
            _set(metrics.CONDITION, key, (condition["type"],), value)
    _measure_sizes(key, status.get("autoscaling") or {})


def unmeasure(key: ClusterKey) -> None:
    """The cluster is gone."""
    for kind in _CONDITIONS:
        _set(metrics.CONDITION, key, (kind,), None)
    _measure_sizes(key, {})


def _measure_sizes(key: ClusterKey, scaling: Object) -> None:
    for tier, gauge in _TIERS.items():
        told = scaling.get(tier) or {}
        limit = told.get("limitedBy")
        for size in _SIZES:
            _set(gauge, key, (size,), float(parse_quantity(told[size])) if size in told else None)
        saving = float((told.get("saving") or {}).get("usdPerHour", 0))
        _set(metrics.SAVING, key, (tier,), saving if limit else None)
        for one in get_args(LimitedBy):
            _set(metrics.LIMITED, key, (tier, one), 1 if one == limit else None)


def _set(gauge: Gauge, key: ClusterKey, labels: tuple[str, ...], value: float | None) -> None:
    """None: there is none."""
    if value is None:
        gauge.remove(key.namespace, key.name, *labels)
    else:
        gauge.labels(key.namespace, key.name, *labels).set(value)
