"""Modules of an engine on the emulated GPU. ``fork_server`` imports them before the first copy."""

import gc
import importlib

from testing.engine import gpu
from testing.vllm_gpu import emulation

MODULES = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.model_executor.models.llama",
)

emulation.start(gpu.environment_of(gpu.EMULATED))
for name in MODULES:
    importlib.import_module(name)
from vllm.model_executor.models import registry  # noqa: E402

# vLLM would start a process that imports all of vLLM to inspect the class of the model.
registry._run_in_subprocess = lambda inspect: inspect()
gc.collect()
gc.freeze()  # a collection in a copy would write to all pages and so copy them
