"""``vllm`` for pods of tests: the real one, with its KV on a simulated GPU if there is one.

``python -m testing.engine.served serve MODEL ...``. It writes the KV of each finished request to
``$HOME/kv.jsonl``, as a line ``[request id, digests]``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from testing.engine import gates, kv_digests, namespaces, simulated_gpu
from testing.engine.environment import NODE, PIPELINE

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


def _create_buffers_of_stages() -> None:
    """Give later pipeline stages the buffer that vLLM 0.32 creates only when it warms up a GPU."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    gather = GPUModelRunner.sync_and_gather_intermediate_tensors

    def create_and_gather(runner: Any, *args: Any) -> Any:
        if runner.intermediate_tensors is None:
            create = runner.model.make_empty_intermediate_tensors
            runner.intermediate_tensors = create(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
        return gather(runner, *args)

    GPUModelRunner.sync_and_gather_intermediate_tensors = create_and_gather


# The processes of engine core and workers start with this module as multiprocessing's main module.
if __name__ == "__mp_main__":
    _device_memory = simulated_gpu.kv_in_device_memory()  # undone if it were garbage-collected
    _device_memory.__enter__()
    _record_kv()

if PIPELINE in os.environ:
    _create_buffers_of_stages()

gates.hold_copies()

if __name__ == "__main__":
    if NODE in os.environ:  # the processes that this one starts are in the same namespaces
        _folder = Path.cwd()
        namespaces.enter(int(os.environ[NODE]), namespaces.NETWORK | namespaces.MOUNT)
        os.chdir(_folder)
    from vllm.entrypoints.cli.main import main

    main()
