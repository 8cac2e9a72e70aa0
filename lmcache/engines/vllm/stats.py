"""What the connector's copies did, through vLLM's own metrics of KV connectors: its log and its /metrics."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

FIGURES = {
    "loads": "Loads of requests from the sidecar's memory that ended, of all ranks.",
    "failed_loads": "Those of which blocks had to be computed after all.",
    "loaded_blocks": "Blocks that were loaded.",
    "load_seconds": "Time in loads, without the wait for their turn.",
    "stores": "Stores of requests' chunks that ended, of all ranks.",
    "stored_rows": "Rows that were copied in time and committed.",
    "lost_rows": "Rows that were not: the engine needed their blocks before.",
    "store_seconds": "Time in stores, without the wait for their turn.",
}


class LMCacheStats(KVConnectorStats):  # type: ignore[misc]  # vllm is untyped
    """``data``: amounts since the last step, by the names of FIGURES."""

    def reset(self) -> None:
        """Forget them."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add those of another rank, or of later."""
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """For a line of the log."""
        return {f"lmcache_{name}": round(self.data.get(name, 0), 3) for name in FIGURES}

    def is_empty(self) -> bool:
        """Whether nothing was copied."""
        return not any(self.data.values())


class LMCachePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counters ``vllm:lmcache_..._total``, with the labels of vLLM's own."""

    def __init__(self, vllm_config: Any, metric_types: Any, labels: list[str], values: Any) -> None:
        super().__init__(vllm_config, metric_types, labels, values)
        counter_type = metric_types[Counter]
        made = {name: counter_type(f"vllm:lmcache_{name}", what, labels) for name, what in FIGURES.items()}
        self._counters = {
            engine: {name: counter.labels(*of_engine) for name, counter in made.items()}
            for engine, of_engine in values.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Count what ``LMCacheStats`` carried."""
        for name, counter in self._counters[engine_idx].items():
            counter.inc(transfer_stats_data.get(name, 0))
