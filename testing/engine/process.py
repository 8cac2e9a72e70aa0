"""Processes of the tiny engine: ``EngineProcess`` steps it directly, ``ServedEngine`` is ``vllm serve``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from testing.child_process import REPOSITORY, SOURCES, ChildProcess, answers, wait_readable
from testing.engine import fork_server, gpu
from testing.engine.environment import ENVIRONMENT, NODE
from testing.engine.tiny_model import tiny_model

CHILD = "testing.engine.child"
_SHORT_PROMPT = [5, 6, 7, 8]
ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 9000,
    "block_size": 32,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 2048,
    "enable_prefix_caching": False,
    "kv_cache_memory_bytes": 160 << 20,
    "seed": 0,
    "disable_log_stats": True,
    "prefix_caching_hash_algo": "sha256_cbor",
}


def connector_config(socket: str | Path, **extra: Any) -> dict[str, Any]:
    """Return the kv-transfer-config that loads this project's connector. ``extra`` are its settings without
    the prefix ``lmcache.``.
    """
    settings = {"lmcache.socket": str(socket), **{f"lmcache.{name}": value for name, value in extra.items()}}
    return {
        "kv_connector": "LMCacheClusterConnector",
        "kv_connector_module_path": "lmcache_client.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }


PATIENCE = {"answer_seconds": 30.0, "prefill_tokens_per_second": 1.0}
"""Settings with which an engine waits for KV, however busy the machine is. By default it computes prompts as
soon as that is faster, so a test that expects a hit would depend on the speed of other processes."""


def patient_config(socket: str | Path, **extra: Any) -> dict[str, Any]:
    """Return the ``connector_config`` of tests that don't test deadlines."""
    return connector_config(socket, **PATIENCE, **extra)


def _python_path(folder: str | Path) -> str:
    """The PYTHONPATH of an engine.

    ``LMCACHE_TEST_VLLM`` is the path of another vLLM than the installed one (``versions``).
    ``LMCACHE_TEST_CPU`` is a folder with a ``sitecustomize`` that simulates another processor.
    """
    folders = map(os.environ.get, ("LMCACHE_TEST_VLLM", "LMCACHE_TEST_CPU"))
    return os.pathsep.join(filter(None, [*folders, str(folder)]))


def multi_config(*children: dict[str, Any]) -> dict[str, Any]:
    """Return the kv-transfer-config of several connectors."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


def example_config(folder: Path) -> dict[str, Any]:
    """Return the kv-transfer-config of vLLM's own example, which stores all KV in files."""
    extra = {"shared_storage_path": str(folder)}
    return {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


class Generated(NamedTuple):
    """The result of a request."""

    tokens: list[int]
    logprobs: list[float]
    ttft: float  # seconds
    ended: float  # seconds after the arrival of the first request of the same call
    num_cached_tokens: int  # as counted by vLLM, which includes loads that failed later
    num_used_cached_tokens: int  # without tokens that the engine computed after a failed load
    finish_reason: str
    kv_transfer_params: dict[str, Any] | None  # what the connector says to the engine that continues
    kv: list[list[str]]  # by layer of each rank: a digest of each full block's bytes; "": slid out
    request_id: str = ""


class EngineFailed(Exception):
    """The engine did not start, ended, or answered with an error. The message ends with its log."""


class EngineProcess(ChildProcess):
    """A vLLM engine in a child process, which ``child.py`` steps. A context manager."""

    child: Sequence[str | Path] = ("-m", CHILD)
    python_path: Path | None = None

    def __init__(
        self,
        log: Path,
        connector: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        **engine_args: Any,
    ) -> None:
        """``engine_args`` override ``ENGINE_ARGS``. The child's output goes to ``log``."""
        super().__init__("the engine", log)
        variables = {**os.environ, **ENVIRONMENT, **(environment or {})}
        args = {**ENGINE_ARGS, **gpu.engine_args(variables), **engine_args}
        if "model" not in args:
            args["model"] = str(tiny_model())
        if connector is not None:
            args["kv_transfer_config"] = connector
        child_reads, self._commands = os.pipe()
        self._answers, child_writes = os.pipe()
        variables |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "PYTHONPATH": _python_path(self.python_path or SOURCES),
        }
        variables |= environment or {}
        is_standard = self.child == EngineProcess.child
        server = fork_server.of_engines(variables.get(gpu.VARIABLE))
        if is_standard and server is not None and fork_server.is_allowed():
            ends = child_reads, child_writes
            cwd = str(self.python_path or REPOSITORY)
            copy = server.start(CHILD, [json.dumps(args)], log, cwd=cwd, env=variables, pass_fds=ends)
            self.adopt(copy)
        else:
            command = [sys.executable, *self.child, child_reads, child_writes, json.dumps(args)]
            self.spawn(
                [*map(str, command)],
                cwd=self.python_path or REPOSITORY,
                env=variables,
                pass_fds=(child_reads, child_writes),
            )
        os.close(child_reads)
        os.close(child_writes)
        self._received = b""
        self._is_ready = False

    def wait_ready(self, timeout: float = 300) -> EngineProcess:
        """Wait until the engine accepts requests."""
        if not self._is_ready:
            self._receive(timeout)
            self._is_ready = True
        return self

    def generate(self, *prompts: list[int], max_tokens: int = 8, **options: Any) -> list[Generated]:
        """Run the prompts (token ids) concurrently to their end."""
        self.start_generate(*prompts, max_tokens=max_tokens, **options)
        return self.finish_generate()

    def run_short_request(self) -> None:
        """Run a request that is too short to be stored."""
        self.generate(_SHORT_PROMPT, max_tokens=1)

    def start_generate(
        self, *prompts: list[int], max_tokens: int = 8, reset_after: int = 0, **options: Any
    ) -> None:
        """Like ``generate``, but return while the requests run. After ``reset_after`` steps, if any, the
        caches of engine and connector are reset, as before a weight update.
        """
        requests = [{"prompt": prompt, "max_tokens": max_tokens, **options} for prompt in prompts]
        self.start(requests, reset_after=reset_after)

    def finish_generate(self, timeout: float = 300) -> list[Generated]:
        """Wait for the requests of ``start_generate``."""
        return [Generated(**result) for result in self._receive(timeout)]

    def run(self, requests: Sequence[dict[str, Any]], **options: Any) -> list[Generated]:
        """Run requests of ``child.Child.generate``, which may arrive at different steps, to their end."""
        self.start(requests, **options)
        return self.finish_generate()

    def start(self, requests: Sequence[dict[str, Any]], **options: Any) -> None:
        """Start what ``run`` runs, and return while the requests run."""
        self._send(do="generate", requests=requests, **options)

    def scrub_kv(self) -> None:
        """Overwrite all of the engine's KV, and empty its own prefix cache."""
        self._call("scrub_kv")

    def save_kv(self, folder: Path | None) -> None:
        """Save the KV of each request that finishes in this folder (``kv_files``), or in none."""
        self._call("save_kv", folder=None if folder is None else str(folder))

    def reset_caches(self) -> bool:
        """Invalidate all KV of the engine and its connector. Returns False if that is not possible now."""
        return bool(self._call("reset_caches"))

    def phases(self) -> dict[str, list[float]]:
        """Seconds of the phases of the last ``generate`` until its last answer: each "arrival" of a request,
        each step that was "idle" or "computing", and each "load" from the cache.
        """
        phases: dict[str, list[float]] = self._call("phases")
        return phases

    def stop_hashing_kv(self) -> None:
        """Leave ``Generated.kv`` empty from now on, so that no measured time includes the hashing."""
        self._call("stop_hashing_kv")

    def start_hashing_kv(self) -> None:
        """Undo ``stop_hashing_kv``."""
        self._call("start_hashing_kv")

    def steps(self) -> list[tuple[float, int]]:
        """Seconds and number of scheduled tokens of each step of the last ``generate``."""
        return [(seconds, tokens) for seconds, tokens in self._call("steps")]

    def block_tokens(self) -> list[int]:
        """Tokens in a block of each layer, in the order of the model."""
        tokens: list[int] = self._call("block_tokens")
        return tokens

    def loaded_tokens(self) -> list[tuple[str, int]]:
        """For each KV group: its kind in vLLM, and the number of tokens loaded since the first call."""
        return [(kind, tokens) for kind, tokens in self._call("loaded_tokens")]

    def describe(self) -> dict[str, str]:
        """Return versions, and how this engine computes."""
        facts: dict[str, str] = self._call("describe")
        return facts

    def num_preemptions(self) -> int:
        """Number of preemptions so far."""
        return int(self._call("num_preemptions"))

    def close(self) -> None:
        """End the engine as a user would, and kill it after 20 s."""
        for descriptor in (self._commands, self._answers):
            if descriptor >= 0:
                os.close(descriptor)
        self._commands = self._answers = -1
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(20)
        self.kill()

    def _call(self, do: str, **arguments: Any) -> Any:
        self._send(do=do, **arguments)
        return self._receive(300)

    def _send(self, **command: Any) -> None:
        self.wait_ready()
        content = json.dumps(command).encode() + b"\n"
        while content:
            content = content[os.write(self._commands, content) :]

    def _receive(self, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        while b"\n" not in self._received:
            is_readable = wait_readable(self._answers, deadline - time.monotonic())
            part = os.read(self._answers, 1 << 20) if is_readable else b""
            if not part:
                problem = "ended" if is_readable else f"did not answer within {timeout:g} s"
                raise EngineFailed(f"the engine {problem}\n{self.log[-4000:]}")
            self._received += part
        line, self._received = self._received.split(b"\n", 1)
        answer = json.loads(line)
        if "error" in answer:
            raise EngineFailed(f"{answer['error']}\n{self.log[-4000:]}")
        return answer["answer"]


class ServedEngine(ChildProcess):
    """``vllm serve`` of the tiny model on a local port. A context manager.

    It needs about 25 s until it is ready, or 5 s as a copy of ``fork_server``.
    """

    def __init__(
        self,
        log: Path,
        port: int,
        connector: dict[str, Any] | None = None,
        *args: str,
        environment: dict[str, str] | None = None,
        model: Path | None = None,
        node: int = 0,
    ) -> None:
        """Start the server. Its output goes to ``log``.

        ``args`` are further arguments of ``vllm serve``. ``model`` replaces the tiny model. ``node``: a
        process in whose network and mount namespace the server runs (``two_nodes``).
        """
        super().__init__("vllm serve", log)
        self.url = f"http://127.0.0.1:{port}"
        arguments = [
            *("serve", str(model or tiny_model())),
            *("--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", "9000", "--block-size", "32"),
            *("--max-num-seqs", "8", "--max-num-batched-tokens", "2048", "--no-enable-prefix-caching"),
            *("--kv-cache-memory-bytes", str(160 << 20), "--enable-prompt-tokens-details"),
            *("--prefix-caching-hash-algo", "sha256_cbor", *args),
        ]
        if connector is not None:
            arguments += ["--kv-transfer-config", json.dumps(connector)]
        variables = {
            **os.environ,
            **ENVIRONMENT,
            "PYTHONPATH": _python_path(SOURCES),
            **(environment or {}),
            **({NODE: str(node)} if node else {}),
        }
        # The engine core and the workers are in the server's process group, and may outlive the server.
        options: dict[str, Any] = {"cwd": str(REPOSITORY), "env": variables, "start_new_session": True}
        if fork_server.is_allowed():
            self.adopt(fork_server.start("testing.engine.served", arguments, log, **options))
        else:
            prefix = ["nsenter", f"--target={node}", "--net", "--mount"] if node else []
            self.spawn([*prefix, Path(sys.executable).parent / "vllm", *arguments], **options)
        self._group = self.pid

    def wait_ready(self, timeout: float = 300) -> ServedEngine:
        """Wait until the server accepts requests."""
        deadline = time.monotonic() + timeout
        while not answers(f"{self.url}/health"):
            if not self.is_running or time.monotonic() > deadline:
                raise EngineFailed(f"vllm serve is not up\n{self.log[-4000:]}")
            time.sleep(0.2)
        return self

    def complete(
        self, prompt: list[int], max_tokens: int = 8, model: str = "tiny", **headers: str
    ) -> dict[str, Any]:
        """POST to /v1/completions with these HTTP headers, and return the answer."""
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        headers |= {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=300) as answer:
            result: dict[str, Any] = json.load(answer)
        return result

    def run_short_request(self) -> None:
        """Run a request that is too short to be stored."""
        self.complete(_SHORT_PROMPT, max_tokens=1)

    def metrics(self, prefix: str, label: str = "") -> dict[str, float]:
        """GET /metrics and return the metrics with this prefix and this label, without their labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        lines = [line for line in lines if line.startswith(prefix) and label in line]
        return {line.split("{")[0]: float(line.split()[-1]) for line in lines}

    def close(self) -> None:
        """End the server as a user would, and kill the processes that are left."""
        if self.is_running:
            self.interrupt()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGKILL)
