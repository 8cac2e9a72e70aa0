"""Speed of copies, their effect on kernels, and the cost of contexts and mappings."""

from __future__ import annotations

from benchmarks.gpu import copies, interference, memory
from benchmarks.gpu.results import Results
from benchmarks.gpu.scale import Scale
from lmcache.cuda.driver import Device


def run(results: Results, scale: Scale) -> None:
    context = Device.visible()[0].primary_context()
    for part in (copies, interference, memory):
        part.measure(results, context, scale)
    context.close()
