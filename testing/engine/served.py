"""``vllm`` for pods of tests: the real one, with its KV on a simulated GPU if there is one.

``python -m testing.engine.served serve MODEL ...``. It writes the KV of each finished request to
``$HOME/kv.jsonl``, as a line ``[request id, digests]``.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from testing.engine import kv_digests, simulated_gpu
from testing.engine.environment import LOAD_GATE

KV_FILE = "kv.jsonl"


# Wait for late stores of blocks that slid out of windows. A busy machine would otherwise miss more.
os.environ.setdefault("LMCACHE_TIMING", "hold_seconds=60,left_behind_seconds=60")


def _record_kv() -> None:
    from vllm.v1.engine.core import EngineCore

    initialize = EngineCore.__init__

    def note(request: str, kv: kv_digests.Digests) -> None:
        with Path(os.environ["HOME"], KV_FILE).open("a") as file:
            file.write(json.dumps([request, kv]) + "\n")

    def initialize_and_watch(core: Any, *args: Any, **kwargs: Any) -> None:
        initialize(core, *args, **kwargs)
        kv_digests.watch(core, note)

    EngineCore.__init__ = initialize_and_watch


def _hold_loads(gate: Path) -> None:
    from lmcache_client.core.copier import CpuCopier

    load = CpuCopier.load

    def wait_and_load(*args: Any) -> None:
        while gate.exists():
            with gate.open("r+") as file:
                file.write("waiting")
            time.sleep(0.001)
        load(*args)

    CpuCopier.load = wait_and_load  # type: ignore[assignment,method-assign]


# The processes of engine core and workers start with this module as multiprocessing's main module.
if __name__ == "__mp_main__":
    _device_memory = simulated_gpu.kv_in_device_memory()  # undone if it were garbage-collected
    _device_memory.__enter__()
    _record_kv()

if LOAD_GATE in os.environ:
    _hold_loads(Path(os.environ[LOAD_GATE]))

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
