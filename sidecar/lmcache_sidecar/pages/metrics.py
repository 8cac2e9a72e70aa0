"""``/metrics``: the engines' calls and all figures of the statistics, in Prometheus' text format.

The library has no native histograms in a format that Prometheus scrapes.

The daemon imports this module at the first scrape, because importing the client library takes a fifth of the
sidecar's start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from lmcache_sidecar.calls import CallStats
from lmcache_sidecar.explain.request_times import RequestHistograms
from lmcache_sidecar.histograms import Histogram
from lmcache_sidecar.pages.stats import StatsPart

_ABOUT_SECONDS = "Seconds from the arrival of a call in the sidecar to its answer"
RPC_SECONDS = ("lmcache_rpc_seconds", _ABOUT_SECONDS, "method")
RPCS = ("lmcache_rpcs", "Calls by gRPC status; Attach counts when its stream ends", ["method", "code"])
"""Name, description and labels of the metrics of calls. A call is not a request of the engine's users."""

_process = ProcessCollector(registry=CollectorRegistry())


class _SingleMetric(Collector):
    """A registry of one metric, to render the text metric by metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[Metric]:
        return [self._metric]


def _calls(calls: CallStats) -> Iterator[Metric]:
    yield _histograms(*RPC_SECONDS, calls.durations)
    name, about, labels = RPCS
    ended = CounterMetricFamily(name, about, labels=labels)
    for values, number in calls.ended.items():
        ended.add_metric(values, number)
    yield ended


def _histograms(name: str, about: str, label: str, by_value: Mapping[str, Histogram]) -> Metric:
    """Make a family of histograms by the value of a label; ``label`` is empty if it has none."""
    family = HistogramMetricFamily(name, about, labels=[label] if label else [])
    for value, histogram in by_value.items():
        family.add_metric([value] if label else [], histogram.buckets(), histogram.seconds)
    return family


def _families(parts: Iterable[StatsPart]) -> Iterable[Metric]:
    """Make the metric families of all parts; similar parts, such as two tiers, share families."""
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for part in parts:
        for figure, value in part.figures.items():
            name = f"{part.prefix}_{figure.metric}"
            if name not in families:
                kind = CounterMetricFamily if figure.is_counter else GaugeMetricFamily
                families[name] = kind(name, figure.about, labels=[*part.labels, *figure.label.split()])
            for key, number in value.items() if figure.label else [("", value)]:
                values = key.split(" ", figure.label.count(" ")) if figure.label else []
                families[name].add_metric([*part.labels.values(), *values], number)
    return families.values()


async def render(
    calls: CallStats, parts: Iterable[StatsPart], times: RequestHistograms | None = None
) -> bytes:
    """Render the whole text. Other tasks run between metrics, so that no lookup waits for a scrape."""
    texts = []
    requests = (_histograms(*family) for family in times.families) if times is not None else ()
    for metric in (*_calls(calls), *requests, *_families(parts), *_process.collect()):
        texts.append(generate_latest(_SingleMetric(metric)))
        await asyncio.sleep(0)
    return b"".join(texts)
