"""A real vLLM with random weights beside the real sidecar: hits from each tier, and decoding meanwhile.

| engine | what |
|---|---|
| A | cold prompts; then all KV is overwritten and loaded from the sidecar's memory; decoding |
| B | a new process, as after a restart of the engine |
| C | on another pod, whose sidecar reads from the peer, and from Redis if there is one |
| D | no connector, for comparison |
| E | on the simulated driver only: makes all copies itself |
| F | reuses documents at other positions (`lmcache.blend`) |
"""

from __future__ import annotations

import os
import shutil

from benchmarks.gpu.results import Results
from benchmarks.gpu.scale import Scale
from testing import deadlines


def run(results: Results, scale: Scale) -> None:
    if scale.is_tiny:  # a test's machine may be busy
        os.environ[deadlines.VARIABLE] = deadlines.PATIENT
    from benchmarks.gpu.engine.course import Course
    from benchmarks.gpu.engine.sizes import of_this_machine
    from benchmarks.gpu.engine.world import NoTimeError, World

    with World(results, scale, of_this_machine(scale)) as world:
        try:
            Course(world, has_redis=_find_redis() is not None).run()
        except NoTimeError as error:
            results.problem(f"not everything was measured: {error}", "some figures are missing on the page")


def _find_redis() -> str | None:
    return shutil.which(os.environ.get("LMCACHE_TEST_SERVER", "redis-server"))
