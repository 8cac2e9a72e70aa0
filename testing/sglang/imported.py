"""Modules that all SGLang engines use. A ``ForkServer`` imports them before the first copy."""

import gc
import importlib
import logging
import multiprocessing
import os
import tempfile
import warnings

import torch

MODULES = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
)


def _fork_schedulers() -> None:
    """Fork schedulers and detokenizers. SGLang spawns them, and each would import all modules again."""
    set_start_method = multiprocessing.set_start_method

    def set_fork(method: str | None, force: bool = False) -> None:
        set_start_method("fork", force=force)

    multiprocessing.set_start_method = set_fork


warnings.filterwarnings("ignore")  # about GPUs
logging.disable(logging.WARNING)  # about models whose packages are missing
for name in MODULES:
    importlib.import_module(name)
logging.disable(logging.NOTSET)
_fork_schedulers()
# A copy makes its thread pool at the first use of torch. Two threads at once would make torch fail:
# "Invalid thread pool!"
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
tempfile.tempdir = None  # each engine has a folder for temporary files
gc.collect()
gc.freeze()  # a collection in a copy would write to all pages and so copy them
