"""Figures of a cluster's status that are metrics, too, for alerts and for those who scale by them."""

from __future__ import annotations

from typing import get_args

from lmcache.units import parse_quantity
from lmcache_operator import metrics
from lmcache_operator.autoscaling.tier import LimitedBy
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import ClusterKey

_CONDITIONS = ("Ready", "Degraded")
_TIERS = {"memory": metrics.MEMORY_BYTES, "remote": metrics.SHARDS}
_SIZES = ("current", "recommended")


def measure(key: ClusterKey, status: Object) -> None:
    """As the status has them now."""
    for condition in status.get("conditions") or ():
        if condition["type"] in _CONDITIONS:
            measured = metrics.CONDITION.labels(key.namespace, key.name, condition["type"])
            measured.set(metrics.CONDITION_VALUES[condition["status"]])
    _unmeasure_sizes(key)
    for tier, gauge in _TIERS.items():
        told = (status.get("autoscaling") or {}).get(tier) or {}
        for size in told.keys() & _SIZES:
            gauge.labels(key.namespace, key.name, size).set(float(parse_quantity(told[size])))
        if limit := told.get("limitedBy"):
            saved = (told.get("saving") or {}).get("usdPerHour", 0)
            metrics.SAVING.labels(key.namespace, key.name, tier).set(float(saved))
            metrics.LIMITED.labels(key.namespace, key.name, tier, limit).set(1)


def unmeasure(key: ClusterKey) -> None:
    """The cluster is gone."""
    for kind in _CONDITIONS:
        metrics.CONDITION.remove(key.namespace, key.name, kind)
    _unmeasure_sizes(key)


def _unmeasure_sizes(key: ClusterKey) -> None:
    for tier, gauge in _TIERS.items():
        for size in _SIZES:
            gauge.remove(key.namespace, key.name, size)
        metrics.SAVING.remove(key.namespace, key.name, tier)
        for limit in get_args(LimitedBy):
            metrics.LIMITED.remove(key.namespace, key.name, tier, limit)
