"""Statistics of the connector's copies in vLLM's metrics of KV connectors: its log and its /metrics."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

FIGURES = {
    "loads": "Ended loads of requests from the sidecar's memory, over all ranks.",
    "failed_loads": "Loads that failed for some of their blocks, which the engine then computed.",
    "loaded_blocks": "Blocks that were loaded.",
    "load_seconds": "Seconds spent in loads, without the time in the queue.",
    "stores": "Ended stores of requests' chunks, over all ranks.",
    "stored_rows": "Rows that were copied in time and committed.",
    "lost_rows": "Rows that were not stored, because the engine reused their blocks before the copy ended.",
    "store_seconds": "Seconds spent in stores, without the time in the queue.",
}
"""Names of the figures, and their descriptions in Prometheus."""

BLEND_FIGURES = {
    "blends": "Prompts that were blended, each counted on one rank.",
    "failed_blends": "Prompts whose computation failed while they were blended, over all ranks.",
    "blend_reused_tokens": "Tokens of blended prompts with stored KV that was used as it is.",
    "blend_recomputed_tokens": "Tokens of blended prompts with stored KV that were computed again.",
    "blend_missing_tokens": "Tokens of blended prompts without stored KV, such as those of questions.",
    "blend_place_seconds": "Seconds of placing stored KV, without the time in the queue, over all ranks.",
    "blend_compute_seconds": "Seconds in which the engine's thread ran blends, over all ranks; on GPUs, until"
    " all work was queued.",
}
"""The same for blended prompts."""


class LMCacheStats(KVConnectorStats):  # type: ignore[misc]  # vllm is untyped
    """Figures since the last step; the keys of ``data`` are those of FIGURES and BLEND_FIGURES."""

    def reset(self) -> None:
        """Set all figures to zero."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the figures of another rank, or of a later step."""
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the figures for a log line. Engines that blend nothing log nothing about it."""
        shown = FIGURES | (BLEND_FIGURES if BLEND_FIGURES.keys() & self.data.keys() else {})
        return {f"lmcache_{name}": round(self.data.get(name, 0), 3) for name in shown}

    def is_empty(self) -> bool:
        """Return True if nothing was copied."""
        return not any(self.data.values())


class LMCachePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counters ``vllm:lmcache_..._total``, with the labels of vLLM's own counters."""

    def __init__(self, vllm_config: Any, metric_types: Any, labels: list[str], values: Any) -> None:
        super().__init__(vllm_config, metric_types, labels, values)
        counter_type = metric_types[Counter]
        described = (FIGURES | BLEND_FIGURES).items()
        made = {name: counter_type(f"vllm:lmcache_{name}", text, labels) for name, text in described}
        self._counters = {
            engine: {name: counter.labels(*label_values) for name, counter in made.items()}
            for engine, label_values in values.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the figures of an ``LMCacheStats`` to an engine's counters."""
        for name, counter in self._counters[engine_idx].items():
            counter.inc(transfer_stats_data.get(name, 0))
