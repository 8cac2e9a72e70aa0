"""A model, sidecars and engines of the step ``vllm``, with their sizes and the time that is left."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.gpu import shared_files
from benchmarks.gpu.engine.sizes import PROCESS_BYTES, Sizes
from benchmarks.gpu.results import Results
from benchmarks.gpu.scale import Scale, size
from testing.child_process import free_port, wait_until
from testing.engine import gpu
from testing.engine.process import PATIENCE, EngineFailed, EngineProcess, connector_config
from testing.processes import SidecarProcess

CHUNK_TOKENS, BLOCK_TOKENS = 256, 16
_ATTACH_SECONDS = 30.0
_PATIENT_SECONDS = 120.0
"""The same on the simulated driver: a test's machine may be busy."""
_LEAST_SECONDS = 45.0
"""An engine is not started with less time. On an H100 its start takes about 30 s."""
_LEAST_PINNED = 0.9
"""Share of the arena that must be pinned before anything is measured."""
_RESERVE_SECONDS = 8.0
"""Time to end all processes."""
_ATTEMPTS = (("FLASH_ATTN", "V2"), ("TRITON_ATTN", "V2"), ("FLASH_ATTN", "V1"), ("TRITON_ATTN", "V1"))
"""Attention backends and model runners of vLLM, in the order in which they are tried."""


class NoTimeError(Exception):
    """Too little time is left for another engine."""


def make_prompt(num_tokens: int, vocab: int, seed: object) -> list[int]:
    """Return token ids that depend on the length and the seed."""
    return random.Random(f"{num_tokens} {seed}").choices(range(4, vocab), k=num_tokens)


class World:
    """A context manager that ends all its processes and removes its files."""

    def __init__(self, results: Results, scale: Scale, sizes: Sizes) -> None:
        self.results, self.scale, self.sizes = results, scale, sizes
        self.facts = results.section(
            "vLLM and its sidecar", ("fact", "value"), "The engine that was measured, and what it runs on."
        )
        self._kind = gpu.EMULATED if scale.is_tiny else gpu.REAL
        self._attempts = list(_ATTEMPTS[:1] if scale.is_tiny else _ATTEMPTS)
        self._is_described = False
        self.has_bars = True
        """False if too little of the arena is pinned: figures of the last engine say nothing about bars."""
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> World:
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-check-")))
        self.arenas = self._shared_folder("arenas-", shared_files.FOLDER)
        self.model = self._make_model()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def prompt(self, num_tokens: int, seed: object) -> list[int]:
        return make_prompt(num_tokens, self.sizes.shape.vocab, seed)

    def start_sidecar(self, name: str, **options: Any) -> SidecarProcess:
        """Start a sidecar that lives as long as this world. Other pods may read its memory tier."""
        usual = {"memory_size": self.sizes.memory_bytes, "peer_host": "127.0.0.1", "peer_port": free_port()}
        sidecar = SidecarProcess(**usual | options)
        sidecar.arena_path = self.arenas / name
        sidecar.environment = {"CUDASIM_ROLE": name} if self.scale.is_tiny else {}
        self._stack.enter_context(sidecar)
        self._stack.callback(shutil.copy, sidecar.log_path, self.results.folder / f"{name}.log")
        return sidecar

    @contextlib.contextmanager
    def engine(
        self,
        name: str,
        sidecar: SidecarProcess | None,
        arguments: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Iterator[EngineProcess]:
        """Start an engine, attached to ``sidecar`` unless that is None. ``arguments`` replace those that
        engines have here. ``settings`` are those of the connector. Raises NoTimeError, and EngineFailed if
        no kind of engine starts.
        """
        patience = PATIENCE if self.scale.is_tiny else {}
        connector = connector_config(sidecar.socket_path, **patience | settings) if sidecar else None
        with self._started(name, connector, arguments or {}) as engine:
            if sidecar is not None:
                self._attach(name, sidecar, engine)
            yield engine

    @contextlib.contextmanager
    def _started(
        self, name: str, connector: dict[str, Any] | None, arguments: Mapping[str, Any]
    ) -> Iterator[EngineProcess]:
        """Start the first kind of engine that works. Later engines are of the same kind."""
        while True:
            backend, runner = self._attempts[0]
            if self.results.seconds_left() < _LEAST_SECONDS:
                raise NoTimeError(f"{self.results.seconds_left():.0f} s were left for engine {name}")
            log = self.results.folder / f"engine-{name}-{backend}-{runner}.log"
            log.unlink(missing_ok=True)
            environment, merged = self._environment(runner), {**self._arguments(), **arguments}
            with EngineProcess(log, connector, environment, attention_backend=backend, **merged) as engine:
                try:
                    engine.wait_ready(self.results.seconds_left() - _RESERVE_SECONDS)
                    warm_up = self.prompt(self.sizes.prompts[0], f"warm up {name}")
                    engine.generate(warm_up, max_tokens=2)  # compiles kernels
                except EngineFailed as error:
                    self.facts.add(f"attempt with {backend}, runner {runner}", _brief(error))
                    del self._attempts[0]
                    if not self._attempts:
                        raise
                    continue
                self._describe(engine)
                del self._attempts[1:]
                yield engine
                return

    def _describe(self, engine: EngineProcess) -> None:
        """Write what is measured: once, because all engines are of one kind."""
        if not self._is_described:
            self._is_described = True
            for name, value in engine.describe().items():
                self.facts.add(name, value)

    def _environment(self, runner: str) -> dict[str, str]:
        variables = gpu.environment_of(self._kind)
        if runner == "V1":
            variables["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        if self.scale.is_tiny:
            variables["CUDASIM_ROLE"] = "engine"
        return variables

    def _arguments(self) -> dict[str, Any]:
        sizes = self.sizes
        longest = max(sizes.prompts)
        return {
            "model": str(self.model),
            "skip_tokenizer_init": True,
            "block_size": BLOCK_TOKENS,
            "max_model_len": longest + CHUNK_TOKENS,
            "max_num_seqs": 2 * sizes.streams,
            "max_num_batched_tokens": min(8704, longest + CHUNK_TOKENS),
            "kv_cache_memory_bytes": sizes.kv_bytes,
            "enable_prefix_caching": True,
            "async_scheduling": False,  # a step's time is then that of its own tokens
        }

    def _attach(self, name: str, sidecar: SidecarProcess, engine: EngineProcess) -> None:
        """Wait until both sides of the connector are attached, and the sidecar copies if it can."""
        sidecar.wait_attached(engine.run_short_request)
        expected = "SharedMemory" if sidecar.options.get("transfer") == "SharedMemory" else "CudaIPC"
        processes = ("engine", "reader") if expected == "CudaIPC" else ("engine",)

        def is_complete() -> bool:
            stats = sidecar.stats()
            return stats["transfer"]["mode"] == expected and _pinned_share(stats, processes) >= _LEAST_PINNED

        seconds = _PATIENT_SECONDS if self.scale.is_tiny else _ATTACH_SECONDS
        with contextlib.suppress(AssertionError):  # the rows below say what is missing
            wait_until(is_complete, timeout=seconds, what="the sidecar reads the GPU")
        self._report_transfer(name, sidecar.stats(), expected, processes)

    def _report_transfer(
        self, name: str, stats: dict[str, Any], expected: str, processes: Sequence[str]
    ) -> None:
        """Report who copies, and how much of the arena ``processes`` have pinned."""
        transfer = stats["transfer"]
        self.facts.add(f"engine {name}: copies", f"{transfer['mode']}: {transfer['reason']}")
        self.facts.add(f"engine {name}: pinned bytes", json.dumps(transfer["pinned_bytes"]))
        share = _pinned_share(stats, processes)
        self.has_bars = share >= _LEAST_PINNED
        if not self.has_bars:
            text = f"**only {share:.0%} of the arena**: copies are slow, so no bars apply"
            self.facts.add(f"engine {name}: pinned in time", text)
        if transfer["mode"] != expected:
            self.results.problem(
                f"stores of engine {name} are copied with {transfer['mode']}: {transfer['reason']}",
                "the sidecar can't read the engine's GPU memory, so the engine copies, which slows it down",
            )
        if transfer["pin_problem"]:
            self.results.problem(
                f"memory of the arena can't be pinned: {transfer['pin_problem']}", "copies are slow"
            )

    def _shared_folder(self, name: str, parent: Path) -> Path:
        """Create a folder that is removed with this world, or by the program if this process is killed."""
        prefix = self.results.shared_prefix + name
        return Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix, dir=parent)))

    def _make_model(self) -> Path:
        """Write a model with random weights into shared memory, or to the disk if that is too small."""
        sizes = self.sizes
        needed = sizes.weight_bytes + sizes.memory_bytes + sizes.other_memory_bytes
        is_in_memory = needed < shared_files.free_bytes(PROCESS_BYTES)
        parent = shared_files.FOLDER if is_in_memory else self.folder
        folder = self._shared_folder("model-", parent)
        command = [sys.executable, "-m", "benchmarks.gpu.engine.weights", str(folder)]
        command.append(json.dumps(dataclasses.asdict(sizes.shape)))
        with (self.results.folder / "model.log").open("w") as log:
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)
        self.facts.add("model", f"{sizes.shape}, weights of {size(sizes.weight_bytes)}, random")
        self.facts.add("weights are in", str(parent))
        return folder


def _pinned_share(stats: dict[str, Any], processes: Sequence[str]) -> float:
    """Return the share of the arena that each of ``processes`` has pinned."""
    pinned = stats["transfer"]["pinned_bytes"]
    return float(
        min(pinned.get(process, 0) for process in processes) / max(1, stats["memory"]["capacity_bytes"])
    )


def _brief(error: Exception) -> str:
    """The lines of an engine's output that name errors."""
    lines = [line for line in str(error).splitlines() if "Error" in line]
    return " / ".join(lines[-3:])[-600:] or str(error)[-300:]
