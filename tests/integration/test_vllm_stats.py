"""The connector's figures in vLLM's metrics of KV connectors, alone and inside MultiConnector."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorStats

from lmcache_client.vllm.connector import LMCacheClusterConnector
from lmcache_client.vllm.stats import LMCacheStats
from testing.engine.process import connector_config

pytestmark = pytest.mark.vllm

FIRST = {"loads": 1, "failed_loads": 0, "loaded_blocks": 8, "load_seconds": 0.25}
SECOND = {"loads": 1, "failed_loads": 1, "loaded_blocks": 0, "load_seconds": 0.5, "stores": 2}


def multi_connector_stats() -> Any:
    """Figures as the engine sends them to the process that counts. vLLM 0.29 leaves the form to msgspec."""
    stats = MultiKVConnectorStats()
    stats["LMCacheClusterConnector"] = LMCacheStats(dict(FIRST))
    return msgspec.to_builtins(stats.to_dict() if hasattr(stats, "to_dict") else stats.data)


def test_figures_are_counters_with_the_labels_of_vllm() -> None:
    registry = CollectorRegistry()

    def counter(name: str, documentation: str, labelnames: list[str]) -> Any:
        return Counter(name, documentation, labelnames, registry=registry)

    metrics = LMCacheClusterConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=None),
        {Counter: counter, Gauge: None, Histogram: None},
        ["model_name", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
    )
    metrics.observe(FIRST, 1)
    metrics.observe(SECOND, 1)
    metrics.observe({"of a later version": 1}, 0)
    text = generate_latest(registry).decode()
    assert 'vllm:lmcache_loads_total{engine="1",model_name="m"} 2.0' in text
    assert 'vllm:lmcache_loads_total{engine="0",model_name="m"} 0.0' in text
    assert 'vllm:lmcache_load_seconds_total{engine="1",model_name="m"} 0.75' in text
    assert 'vllm:lmcache_blends_total{engine="1",model_name="m"} 0.0' in text
    assert "lmcache_blends" not in LMCacheStats(dict(FIRST)).reduce()
    assert LMCacheStats({"blends": 2}).reduce()["lmcache_blends"] == 2


def test_counters_are_registered_inside_multi_connector() -> None:
    """Without its own counters, vLLM's MultiConnector would end the counting process at the first figure."""
    ours = connector_config("unused")
    example = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    connectors = {"connectors": [ours, example]}
    transfer = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=connectors
    )
    registry = CollectorRegistry()
    metrics = MultiConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=transfer),
        {Counter: partial(Counter, registry=registry), Gauge: None, Histogram: None},
        ["engine"],
        {0: ["0"]},
    )
    metrics.observe(multi_connector_stats(), 0)
    assert 'vllm:lmcache_loaded_blocks_total{engine="0"} 8.0' in generate_latest(registry).decode()
