"""SGLang servers of a tiny model: ``SGLangEngine`` is ``python -m sglang.launch_server`` on a local port."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import random
import re
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from testing import deadlines, workers
from testing.child_process import free_port, wait_until
from testing.engine.process import EngineFailed
from testing.engine.tiny_model import MAX_TOKENS, tiny_model
from testing.sglang.program import Program

PAGE_TOKENS = 64
ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "disable_overlap_schedule": True,
    "skip_server_warmup": True,
    "sleep_on_idle": True,  # otherwise an idle scheduler occupies a core
    "random_seed": 0,
    "page_size": PAGE_TOKENS,
    "max_total_tokens": 16384,
    "max_running_requests": 8,
    "mem_fraction_static": 0.5,
    "enable_cache_report": True,
    "enable_metrics": True,
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2.0,
    "hicache_write_policy": "write_through",
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "page_first_direct",
    "hicache_storage_prefetch_policy": "wait_complete",
}
"""Arguments of the server, by their names on the command line. An engine may override each."""
DEEPSEEK2_ARGUMENTS: dict[str, Any] = {
    "json_model_override_args": {
        "moe_layer_freq": 1,
        "rope_scaling": {
            "rope_type": "deepseek_yarn",
            "factor": 1.0,
            "original_max_position_embeddings": MAX_TOKENS,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }
}
"""Arguments that SGLang needs for the model ``tiny_kinds.DEEPSEEK2``, which has MLA."""
HICACHE: dict[str, Any] = {"prefetch_threshold": PAGE_TOKENS, "hicache_storage_pass_prefix_keys": True}
"""Settings of HiCache that the tests' storage backends have in common."""
_PATIENCE: dict[str, Any] = {
    "prefetch_timeout_base": 60,
    **{f"lmcache.{name}_seconds": 8.0 for name in ("lookup", "row", "load")},
}
"""Settings with which the policy ``timeout``, lookups and loads wait. Ours allow at most eight seconds."""
MEASURED: dict[str, Any] = {
    "environment": {"LMCACHE_TEST_ATTENTION_OF_NEW_TOKENS": "1"},
    "chunked_prefill_size": 16384,
}
"""Options of ``SGLangEngine`` for measurements with long prompts: no token's attention is computed twice.

A hit then takes the time that its load and its new tokens need. Its results may have other bits than those of
a cold prompt.
"""
_ADMIN_KEY = "admin"
"""SGLang attaches and detaches storage backends only for an administrator."""
_SHARED_MEMORY = re.compile(r"/dev/shm/(?:sglang_loads|sgl_shm)_\S+")
"""Shared memory that SGLang does not remove when it ends."""


class Storage(NamedTuple):
    """A storage backend below SGLang's host cache."""

    backend: str
    extra_config: dict[str, Any]
    environment: Mapping[str, str] = {}

    def arguments(self) -> dict[str, Any]:
        """Return the server's arguments that attach the backend when the server starts."""
        prefix = "hicache_storage_backend"
        return {prefix: self.backend, f"{prefix}_extra_config": self.extra_config}


def lmcache_storage(socket: str | Path, **settings: Any) -> Storage:
    """Return this project's backend. ``settings`` are its settings without the prefix ``lmcache.``."""
    prefixed = {f"lmcache.{name}": value for name, value in {"socket": str(socket), **settings}.items()}
    backend = {
        "backend_name": "lmcache",
        "module_path": "lmcache_client.sglang.backend",
        "class_name": "LMCacheBackend",
        "interface_v1": 1,
    }
    return Storage("dynamic", backend | HICACHE | prefixed)


def patient_storage(socket: str | Path, **settings: Any) -> Storage:
    """Return this project's backend for a busy machine, on which the product's deadlines cause misses."""
    name, extra_config, _ = lmcache_storage(socket, **settings)
    return Storage(name, extra_config | _PATIENCE, {deadlines.VARIABLE: deadlines.PATIENT})


def file_storage(folder: Path) -> Storage:
    """Return SGLang's own backend, which stores one file for each page."""
    return Storage("file", HICACHE, {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)})


def make_prompt(num_tokens: int, seed: object = 0) -> list[int]:
    """Return token ids of the tiny models. The same number and seed give the same ids."""
    tokens = random.Random(f"{num_tokens} {seed}")
    return [tokens.randrange(4, 260) for _ in range(num_tokens)]


class Answer(NamedTuple):
    """The result of a request."""

    tokens: list[int]
    num_cached_tokens: int
    cached: dict[str, int]
    """Cached tokens by tier: ``device``, ``host`` and ``storage``."""
    first_token_seconds: float
    meta: dict[str, Any]
    """All fields of SGLang's ``meta_info``."""


class PendingAnswer:
    """A request that the server runs."""

    def __init__(self, engine: SGLangEngine, connection: http.client.HTTPConnection) -> None:
        self._engine = engine
        self._connection = connection

    def wait(self) -> Answer:
        """Wait for the answer. Raises EngineFailed."""
        result = json.loads(self._engine.read(self._connection))
        meta = result["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        cached = {tier: details.get(tier, 0) for tier in ("device", "host", "storage")}
        tokens, num_cached = result["output_ids"], meta["cached_tokens"]
        return Answer(tokens, num_cached, cached, meta.get("first_token_latency", 0.0), meta)

    def abandon(self) -> None:
        """Close the connection. SGLang then aborts the request."""
        self._connection.close()


class SGLangEngine(Program):
    """An SGLang server of the tiny model. A context manager, which kills the server at its end.

    The server needs about 25 s of processor time until it is ready, or 1 s as a copy of a fork server.
    """

    def __init__(
        self,
        log: Path,
        storage: Storage | None = None,
        *,
        model: Path | None = None,
        environment: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        """Start the server without waiting for it.

        Args:
            log: file for the server's output
            storage: a backend to attach, or None
            model: the model's folder instead of the tiny Llama's
            environment: further variables, as for ``Program``
            arguments: arguments that override ``ARGUMENTS``. None and False omit an argument.
        """
        self._port = free_port()
        self._shared_memory: set[str] = set()
        all_arguments = {
            "model_path": model or tiny_model(),
            "host": "127.0.0.1",
            "port": self._port,
            "admin_api_key": _ADMIN_KEY,
            **ARGUMENTS,
            **(storage.arguments() if storage else {}),
            **arguments,
        }
        self._host = "::1" if all_arguments["host"] == "::" else "127.0.0.1"
        num_ranks = math.prod(all_arguments.get(f"{kind}_size", 1) for kind in ("tp", "pp", "dp"))
        cores = "|".join([str(workers.core())] * num_ranks)
        super().__init__(
            "the SGLang server",
            log,
            "sglang.launch_server",
            _flags(all_arguments),
            environment={
                "SGLANG_CPU_OMP_THREADS_BIND": cores,
                **(storage.environment if storage else {}),
                **(environment or {}),
            },
        )

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    def wait_ready(self, timeout: float = 300) -> SGLangEngine:
        """Wait until the server accepts requests. Raises EngineFailed."""
        deadline = time.monotonic() + timeout
        while not self._is_healthy():
            if not self.is_running or time.monotonic() > deadline:
                raise EngineFailed(f"the SGLang server is not ready\n{self.log[-4000:]}")
            time.sleep(0.05)
        for process in self.processes():
            with contextlib.suppress(OSError):  # the process has ended
                self._shared_memory.update(_SHARED_MEMORY.findall(Path(f"/proc/{process}/maps").read_text()))
        return self

    def generate(self, prompt: list[int], max_new_tokens: int = 8, **fields: Any) -> Answer:
        """Run one prompt (token ids) to its end. ``fields`` are those of SGLang's ``/generate``, such as
        ``cache_salt``, ``rid``, ``lora_path`` and ``return_logprob``.
        """
        return self.start_generate(prompt, max_new_tokens, **fields).wait()

    def generate_all(self, *prompts: list[int], max_new_tokens: int = 8, **fields: Any) -> list[Answer]:
        """Run prompts concurrently to their end."""
        pending = [self.start_generate(prompt, max_new_tokens, **fields) for prompt in prompts]
        return [answer.wait() for answer in pending]

    def start_generate(
        self, prompt: list[int], max_new_tokens: int = 8, timeout: float = 300, **fields: Any
    ) -> PendingAnswer:
        """Like ``generate``, but return while the request runs."""
        sampling = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True}
        sampling |= fields.pop("sampling_params", {})
        body = {"input_ids": prompt, "sampling_params": sampling, **fields}
        return PendingAnswer(self, self._request("POST", "/generate", body, timeout))

    def flush_cache(self) -> None:
        """Empty the caches of device and host, but not the storage.

        SGLang first waits until no request runs and no page is stored or loaded.
        """
        self.request("POST", "/flush_cache?timeout=60")

    def clear_storage(self) -> None:
        """Ask the storage backend to remove all pages."""
        self.request("POST", "/hicache/storage-backend/clear")

    def attach(self, storage: Storage, prefetch_policy: str = "wait_complete") -> None:
        """Attach a storage backend. Its environment must be the server's already."""
        name = "hicache_storage_backend"
        config = json.dumps(storage.extra_config)
        body = {name: storage.backend, f"{name}_extra_config_json": config}
        body["hicache_storage_prefetch_policy"] = prefetch_policy
        self.request("PUT", "/hicache/storage-backend", body)

    def detach(self) -> None:
        """Detach the storage backend."""
        self.request("DELETE", "/hicache/storage-backend")

    def update_weights_from_disk(self, model: Path, **fields: Any) -> None:
        """Load the weights of another model of the same shape."""
        self.request("POST", "/update_weights_from_disk", {"model_path": str(model), **fields})

    def metrics(self, prefix: str = "sglang:") -> dict[str, float]:
        """Return the metrics with this prefix, each as a sum over its labels."""
        sums: Counter[str] = Counter()
        for line in self.request("GET", "/metrics").splitlines():
            if line.startswith(prefix):
                sums[re.split(r"[{ ]", line)[0]] += float(line.split()[-1])  # type: ignore[assignment]
        return dict(sums)

    def num_stored_tokens(self) -> int:
        """Return the number of tokens that the storage backend has accepted, as a sum over ranks."""
        return int(self.metrics("sglang:backuped_tokens_total").get("sglang:backuped_tokens_total", 0))

    def wait_stored(self, num_tokens: int, timeout: float = 60) -> None:
        """Wait until the storage backend has accepted this many tokens since the start."""
        wait_until(
            lambda: self.num_stored_tokens() >= num_tokens,
            timeout=timeout,
            what=f"{num_tokens} tokens are stored",
        )

    def request(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout: float = 300
    ) -> str:
        """Send a request, and return the body of its answer. Raises EngineFailed."""
        return self.read(self._request(method, path, body, timeout))

    def read(self, connection: http.client.HTTPConnection) -> str:
        """Return the body of the answer to a request that was sent. Raises EngineFailed."""
        try:
            response = connection.getresponse()
            content = response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise EngineFailed(f"{type(error).__name__}: {error}\n{self.log[-4000:]}") from error
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise EngineFailed(f"HTTP {response.status}: {content}\n{self.log[-4000:]}")
        return content

    def stop(self, timeout: float = 60) -> int:
        """End the server as Kubernetes does, with SIGTERM. Returns the exit status."""
        return self.terminate(timeout=timeout)

    def close(self) -> None:
        super().close()
        for path in self._shared_memory:
            Path(path).unlink(missing_ok=True)

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float
    ) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        content = None if body is None else json.dumps(body)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {_ADMIN_KEY}"}
        try:
            connection.request(method, path, content, headers)
        except OSError as error:
            connection.close()
            raise EngineFailed(f"{type(error).__name__}: {error}\n{self.log[-4000:]}") from error
        return connection

    def _is_healthy(self) -> bool:
        try:
            self.request("GET", "/ready", timeout=5)
        except EngineFailed:
            return False
        return True


def _flags(arguments: Mapping[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        flags.append(f"--{name.replace('_', '-')}")
        if isinstance(value, dict | list):
            flags.append(json.dumps(value))
        elif value is not True:
            flags.append(str(value))
    return flags
