"""``/metrics``: the engines' calls and all figures of the statistics, in Prometheus' text format.

The daemon imports this module at the first scrape, because importing the client library takes a fifth of the
sidecar's start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from lmcache_sidecar.stats import CallStats, Part

_process = ProcessCollector(registry=CollectorRegistry())


class _SingleMetric(Collector):
    """A registry of one metric, to render the text metric by metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return [self._metric]


def _calls(calls: CallStats) -> Iterator[Metric]:
    about = "Seconds from the arrival of a call in the sidecar to its answer"
    seconds = HistogramMetricFamily("lmcache_request_seconds", about, labels=["method"])
    for method, total in calls.seconds.items():
        seconds.add_metric([method], calls.buckets(method), total)
    yield seconds
    about = "Calls by gRPC status; Attach counts when its stream ends"
    ended = CounterMetricFamily("lmcache_requests", about, labels=["method", "code"])
    for labels, number in calls.ended.items():
        ended.add_metric(labels, number)
    yield ended


def _families(parts: Iterable[Part]) -> Iterable[Metric]:
    """Make the metric families of all parts; similar parts, such as two tiers, share families."""
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for part in parts:
        for figure, value in part.figures.items():
            name = f"{part.prefix}_{figure.metric}"
            if name not in families:
                kind = CounterMetricFamily if figure.is_counter else GaugeMetricFamily
                families[name] = kind(name, figure.about, labels=[*part.labels, *figure.label.split()])
            for key, number in value.items() if figure.label else [("", value)]:
                families[name].add_metric([*part.labels.values(), *([key] if figure.label else [])], number)
    return families.values()


async def render(calls: CallStats, parts: Iterable[Part]) -> bytes:
    """Render the whole text. Other tasks run between metrics, so that no lookup waits for a scrape."""
    texts = []
    for metric in (*_calls(calls), *_families(parts), *_process.collect()):
        texts.append(generate_latest(_SingleMetric(metric)))
        await asyncio.sleep(0)
    return b"".join(texts)
