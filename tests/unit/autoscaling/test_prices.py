"""Prices of memory: a pod's memory is often paid for anyway, and shards' memory is not."""

from typing import Any

import pytest

from lmcache_operator.api.parse import parse
from tests.harness.operator.model import cluster


@pytest.mark.parametrize(
    ("declared", "usd_per_hour"),
    [
        ({}, (2.5, 0.0, 0.004)),
        ({"memoryGiBHour": "0"}, (2.5, 0.0, 0.004)),
        ({"memoryGiBHour": "0.01"}, (2.5, 0.01, 0.01)),
        ({"gpuHour": "3.90", "memoryGiBHour": "0.01", "shardGiBHour": "0.003"}, (3.9, 0.01, 0.003)),
        ({"shardGiBHour": "0"}, (2.5, 0.0, 0.0)),
    ],
)
def test_shards_have_a_default_price_and_memory_has_none(declared: Any, usd_per_hour: Any) -> None:
    resource = cluster(tiers={"memory": {"size": "64Gi"}})
    resource["spec"]["autoscaling"] = {"prices": declared}
    assert parse(resource).spec.autoscaling.prices.usd_per_hour == usd_per_hour
