"""Kinds of engines that the demo can start: servers with an OpenAI API on the CPU, with a tiny Llama."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from demo.show import command
from testing.child_process import free_port
from testing.engine.process import ServedEngine, connector_config
from testing.packages import InstallationError
from testing.processes import SidecarProcess
from testing.sglang import environment
from testing.sglang.engine import MEASURED, PAGE_TOKENS, SGLangEngine, lmcache_storage


class Engine(AbstractContextManager[Any], Protocol):
    """A running server. Its model is named ``tiny``."""

    @property
    def url(self) -> str: ...
    def wait_ready(self) -> object: ...
    def close(self) -> None: ...


class Kind(Protocol):
    """A kind of engine."""

    name: str
    chunk_tokens: int
    """Tokens of a row in the sidecar."""
    num_clients: int
    """Number of clients with which one engine attaches to its sidecar."""

    can_blend: bool
    """Whether its engines blend prompts of documents."""

    def prepare(self) -> None:
        """Install the engine if ``make setup`` did not. Ends the demo if this fails."""

    def start(self, sidecar: SidecarProcess, log: Path) -> Engine:
        """Print the command, and start an engine with an empty KV cache. Does not wait until it is ready."""


class VLLM:
    """``vllm serve`` with the connector."""

    name, chunk_tokens, num_clients = "vLLM", 256, 2
    can_blend = True

    def prepare(self) -> None:
        """Do nothing: ``make setup`` installed vLLM."""

    def start(self, sidecar: SidecarProcess, log: Path) -> Engine:
        # An answer of the sidecar that a busy machine delays does not change the results.
        config = connector_config(sidecar.socket_path, blend="request", answer_seconds=30)
        command(
            f'vllm serve tiny --kv-transfer-config \'{{"kv_connector": "{config["kv_connector"]}", ...}}\''
        )
        # Two threads on any cores, as in `python -m benchmarks vllm`. The other engines are idle meanwhile.
        threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        # vLLM's default on CPUs. Blended prompts need it: it also limits the runs of tokens in one pass.
        num_seqs = "--max-num-seqs", "128"
        return ServedEngine(log, free_port(), config, *num_seqs, environment=threads)


class SGLang:
    """``sglang.launch_server`` with the storage backend for HiCache."""

    name, chunk_tokens, num_clients = "SGLang", PAGE_TOKENS, 1
    can_blend = False

    def prepare(self) -> None:
        try:
            environment.prepare()
        except (FileNotFoundError, InstallationError) as error:
            sys.exit(str(error))

    def start(self, sidecar: SidecarProcess, log: Path) -> Engine:
        storage = lmcache_storage(sidecar.socket_path)
        config = f'{{"class_name": "{storage.extra_config["class_name"]}", ...}}'
        command(
            "python -m sglang.launch_server --model-path tiny --enable-hierarchical-cache"
            f" --hicache-storage-backend-extra-config '{config}'"
        )
        mode = "buffer_only"  # the sidecar's memory is the cache, not SGLang's host memory
        return SGLangEngine(log, storage, served_model_name="tiny", hicache_host_memory_mode=mode, **MEASURED)


KINDS: dict[str, Kind] = {"vllm": VLLM(), "sglang": SGLang()}
