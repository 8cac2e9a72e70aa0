"""/metrics: the engine's calls, and all figures of the stats, in Prometheus' text format.

Imported at the first scrape: the library is a fifth of the sidecar's start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from lmcache_sidecar.stats import CallStats, Part

_process = ProcessCollector(registry=CollectorRegistry())


class _One(Collector):
    """A registry of one metric, so that the text is made metric by metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return [self._metric]


def _calls(calls: CallStats) -> Iterator[Metric]:
    about = "Time from a call's arrival to its answer, in the sidecar, in seconds"
    seconds = HistogramMetricFamily("lmcache_request_seconds", about, labels=["method"])
    for method, total in calls.seconds.items():
        seconds.add_metric([method], calls.buckets(method), total)
    yield seconds
    about = "Calls by gRPC status; Attach when its stream ends"
    ended = CounterMetricFamily("lmcache_requests", about, labels=["method", "code"])
    for labels, number in calls.ended.items():
        ended.add_metric(labels, number)
    yield ended


def _families(parts: Iterable[Part]) -> Iterable[Metric]:
    """Parts that are alike, as two tiers are, share their families."""
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
    """The whole text, family by family: other tasks run in between, so that no lookup waits for a scrape."""
    texts = []
    for metric in (*_calls(calls), *_families(parts), *_process.collect()):
        texts.append(generate_latest(_One(metric)))
        await asyncio.sleep(0)
    return b"".join(texts)
