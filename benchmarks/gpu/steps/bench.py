"""Speed of copies, their effect on kernels, and the cost of contexts and mappings."""

from __future__ import annotations

import contextlib

from benchmarks.gpu import copies, interference, memory
from benchmarks.gpu.results import Results
from benchmarks.gpu.scale import Scale
from lmcache_client.cuda.driver import Device
from lmcache_client.cuda.errors import CudaError


def run(results: Results, scale: Scale) -> None:
    context = Device.visible()[0].primary_context()
    for part in (copies, interference, memory):
        part.measure(results, context, scale)
    copies.measure_pageable(results, context, scale)  # last: an error may break the context
    with contextlib.suppress(CudaError):
        context.close()
