"""``vllm`` for pods of tests: the real one, but its KV lies on a simulated GPU if there is one.

``python -m testing.engine.served serve MODEL ...``. The KV of each finished request is told in
``$HOME/kv.jsonl``, a line ``[request id, digests]`` each.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from testing.engine import kv_digests, simulated_gpu

KV_FILE = "kv.jsonl"


def give_no_store_up() -> None:
    """On a busy machine stores would be late for blocks that windows leave behind, and hits fewer."""
    from lmcache.engines.core import worker

    worker.HOLD_SECONDS = worker.LEFT_BEHIND_SECONDS = 60.0


def _tell_kv() -> None:
    from vllm.v1.engine.core import EngineCore

    initialize = EngineCore.__init__

    def note(request: str, kv: kv_digests.Digests) -> None:
        with Path(os.environ["HOME"], KV_FILE).open("a") as file:
            file.write(json.dumps([request, kv]) + "\n")

    def initialize_and_watch(core: Any, *args: Any, **kwargs: Any) -> None:
        initialize(core, *args, **kwargs)
        kv_digests.watch(core, note)

    EngineCore.__init__ = initialize_and_watch


# The processes of engine core and workers begin with this module as multiprocessing's main one.
if __name__ == "__mp_main__":
    _for_good = simulated_gpu.kv_in_device_memory()  # undone when nobody refers to it
    _for_good.__enter__()
    give_no_store_up()
    _tell_kv()

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
