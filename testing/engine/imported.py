"""Modules that all test engines use. ``fork_server`` imports them before the first copy."""

import contextlib
import functools
import gc
import importlib
import multiprocessing
import os
import time
import types
from typing import Any

MODULES = (
    "vllm",
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
)


def _fork_engine_cores_and_workers() -> None:
    """Fork on CPUs, too. By default, vLLM forks on GPUs only, and its processes on CPUs import all again."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_fork(config: Any) -> None:
        check(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(check_and_fork)


def _fork_api_servers() -> None:
    """Fork several API servers, each of which would import all again.

    Their metrics are files that they share. ``prometheus_client`` chooses files when it is imported, if a
    variable is set that vLLM sets later.
    """
    from prometheus_client import values
    from vllm.v1 import utils

    def fork(_: str) -> Any:
        values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]
        return multiprocessing.get_context("fork")

    utils.multiprocessing = types.SimpleNamespace(get_context=fork)


def _inspect_models_in_process() -> None:
    """Inspect the class of a model in the engine's process, which loads it anyway.

    vLLM starts a process that imports all of vLLM, unless its cache knows the class. This takes 3.5 s for
    each new kind of model.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


def _sleep_between_polls() -> None:
    """Let a rank sleep while it waits for the others.

    vLLM polls with ``sched_yield``. Beside busy loops on Linux 6.18, other processes then got no processor
    for 53 s (run delay in /proc/PID/schedstat).
    """
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = functools.partial(time.sleep, 1e-4)


for name in MODULES:
    with contextlib.suppress(ImportError):  # other versions of vLLM lack some modules
        importlib.import_module(name)
_fork_engine_cores_and_workers()
_fork_api_servers()
_inspect_models_in_process()
_sleep_between_polls()
gc.collect()
gc.freeze()  # a collection in a copy would write to all pages and so copy them: one second for each engine
