"""Eight threads on one local store for a minute; every byte is compared."""

from __future__ import annotations

from benchmarks.report import Figure, Report
from tests.harness.stress import Stress

SECONDS, NUM_THREADS = 60.0, 8


def run() -> Report:
    stress = Stress()
    stress.run(NUM_THREADS, SECONDS)
    figures = [Figure(name.replace("_", " "), count, "times") for name, count in stress.counts.items()]
    figures.append(Figure("wrong bytes", 0, "payloads", "0", holds=True))
    conditions = f"{NUM_THREADS} threads for {SECONDS:.0f} s; a wrong byte ends it with an error"
    return Report("stress", conditions, figures)
