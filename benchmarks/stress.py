"""Run eight threads on one local store for a minute, and compare every byte."""

from __future__ import annotations

import contextlib

from benchmarks.report import Figure, Report
from testing.stress import Stress

SECONDS, NUM_THREADS = 60.0, 8


def run() -> Report:
    stress = Stress()
    with contextlib.suppress(AssertionError):
        stress.run(NUM_THREADS, SECONDS)
    figures = [Figure(name.replace("_", " "), count, "times") for name, count in stress.counts.items()]
    figures.append(Figure("compared", stress.num_compared, "payloads"))
    figures.append(Figure("wrong", len(stress.errors), "payloads", "0", holds=not stress.errors))
    conditions = f"{NUM_THREADS} threads for {SECONDS:.0f} s, or until the first wrong byte"
    return Report("stress", conditions, figures)
