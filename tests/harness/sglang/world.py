"""SGLang servers above real sidecars, and the answers that they must give.

An engine without storage computes the expected answers. An engine with a cache must give the same tokens with
the same probabilities. ``MixedUpPages`` proves that a comparison notices wrong KV.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from testing.child_process import wait_until
from testing.engine import fork_server, tiny_model
from testing.processes import RedisProcess, SidecarProcess
from testing.sglang.engine import (
    MEASURED,
    PAGE_TOKENS,
    Answer,
    SGLangEngine,
    Storage,
    make_prompt,
    patient_storage,
)
from tests.harness.leaks import lasting

if TYPE_CHECKING:
    from typing import Self  # Python 3.11

ANSWER_TOKENS = 16
LOGPROB_TOLERANCE = 1e-3
"""Batches of other sizes round differently. Other KV changes logprobs by more than 0.1."""
_FAULTS = "sidecar/lmcache_client/sglang/", "offline", "this engine cannot be cached"
"""Texts that the log of an engine without faults does not contain: frames of tracebacks, and messages."""
BUFFERED = {"max_total_tokens": 4096, "hicache_host_memory_mode": "buffer_only", "hicache_ratio": 1.0}
"""Arguments of an engine that loads most prompts: its device holds 4,096 tokens, its host memory none."""
TRACE = "LMCACHE_TEST_TRACE"
"""Environment variable with the path of the record of ``sglang_traced``."""
SWITCH = "LMCACHE_TEST_SWITCH"
"""Environment variable with the path of the file that switches ``half_off`` and ``held_writes``."""
HELD_WRITE = "a test holds this write"
"""Text that the log of an engine with ``held_writes`` contains once for each held write."""
_numbers = itertools.count()


class World(NamedTuple):
    """Processes and folder that all tests of a worker share, except the engines with a cache."""

    logs: Path
    redis: RedisProcess
    sidecar: SidecarProcess
    """A sidecar with a disk, and Redis as its remote tier."""
    expected: Reference

    @property
    def storage(self) -> Storage:
        return patient_storage(self.sidecar.socket_path)

    def forget_memory(self) -> None:
        """Restart the sidecar with an empty memory."""
        self.sidecar.kill()
        self.sidecar.arena_path.unlink()
        self.sidecar.start()


class _SessionSidecar(SidecarProcess):
    """A sidecar that outlives the test that has restarted it."""

    def start(self, *, timeout: float = 60.0) -> None:
        with lasting():
            super().start(timeout=timeout)


@contextlib.contextmanager
def serving_world(folder: Path) -> Iterator[World]:
    """Run Redis, a sidecar, and an engine for expected answers."""
    with (
        RedisProcess() as redis,
        serving_sidecar(
            _SessionSidecar, remote_url=redis.url, disk_path=folder / "disk", disk_size="1Gi"
        ) as sidecar,
        reference(folder) as expected,
    ):
        yield World(folder, redis, sidecar, expected)


def full_pages(num_tokens: int) -> int:
    """Return the tokens of a prompt that a cache can have: SGLang always computes at least one token."""
    return max(0, num_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS


def new_prompt(num_tokens: int) -> list[int]:
    """Return a prompt that no other test has."""
    return make_prompt(num_tokens, f"new {next(_numbers)}")


@contextlib.contextmanager
def serving(
    folder: Path,
    storage: Storage | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    **arguments: Any,
) -> Iterator[SGLangEngine]:
    """Run a server. Raises AssertionError if it has ended by itself, or if its log shows a fault.

    It computes the attention of new tokens only, so hits may have other bits than cold prompts.
    """
    if storage is None:
        arguments.setdefault("enable_hierarchical_cache", False)
    log = folder / f"sglang-{next(_numbers)}.log"
    environment = {**MEASURED["environment"], **(environment or {})}
    with _copies(), SGLangEngine(log, storage, environment=environment, **arguments) as engine:
        yield engine.wait_ready()
        engine.check()
        for fault in _FAULTS:
            assert fault not in engine.log, engine.log[-8000:]


def _copies() -> contextlib.AbstractContextManager[None]:
    """Allow copies of a fork server. A fixture of the session starts before its module allows them."""
    return contextlib.nullcontext() if fork_server.is_allowed() else fork_server.allowed()


@contextlib.contextmanager
def attached(
    engine: SGLangEngine, sidecar: SidecarProcess, storage: Storage, policy: str = "wait_complete"
) -> Iterator[None]:
    """Replace the storage backend of an idle engine."""

    def attach(*arguments: Any) -> None:
        engine.flush_cache()  # SGLang refuses to detach while it stores
        engine.detach()
        engine.attach(*arguments)
        wait_attached(engine, sidecar)

    attach(storage, policy)
    yield
    attach(patient_storage(sidecar.socket_path))


@contextlib.contextmanager
def serving_sidecar(kind: type[SidecarProcess] = SidecarProcess, **options: Any) -> Iterator[SidecarProcess]:
    """Run a sidecar of 256 MiB, which holds 65,000 tokens of the tiny Llama."""
    options = {"memory_size": "256Mi", "remote_timeout_seconds": 60, **options}
    with _copies(), kind(**options) as sidecar:
        yield sidecar


@contextlib.contextmanager
def writes_held(switch: Path) -> Iterator[None]:
    """Hold all writes of backends of ``held_writes`` with this file."""
    with open(switch) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def wait_attached(engine: SGLangEngine, sidecar: SidecarProcess, num_ranks: int = 1) -> None:
    """Wait until all ranks use the cache, and until all memory of the sidecar is usable."""

    def is_ready(stats: dict[str, Any]) -> bool:
        ranks = [client for client in stats["clients"] if client["pid"] in processes]
        memory = stats["memory"]
        num_attached = sum(client["is_attached"] for client in ranks)
        if num_attached != num_ranks or memory["usable_rows"] != memory["capacity_rows"]:
            return False
        log = engine.log  # the sidecar reports a client as attached before the client knows
        return all(f"epoch {client['epoch']}" in log for client in ranks)

    processes = set(engine.processes())
    sidecar.wait_until(is_ready)


def generate(engine: SGLangEngine, prompt: list[int], **fields: Any) -> Answer:
    """Run a prompt, with the logprobs of its answer."""
    return engine.generate(prompt, ANSWER_TOKENS, return_logprob=True, **fields)


def generate_all(engine: SGLangEngine, prompts: Iterable[list[int]], **fields: Any) -> list[Answer]:
    """Run prompts concurrently, with the logprobs of their answers."""
    return engine.generate_all(*prompts, max_new_tokens=ANSWER_TOKENS, return_logprob=True, **fields)


def store(engine: SGLangEngine, *prompts: list[int], num_ranks: int = 1, **fields: Any) -> list[Answer]:
    """Run prompts, and wait until this many ranks have stored all their full pages. Returns the answers."""
    num_before = engine.num_stored_tokens()
    answers = generate_all(engine, prompts, **fields)
    # The KV of an answer's last token is never computed.
    ends = (len(prompt) + ANSWER_TOKENS - 1 for prompt in prompts)
    num_new = sum(end // PAGE_TOKENS * PAGE_TOKENS for end in ends)
    num_new -= sum(answer.num_cached_tokens for answer in answers)
    engine.wait_stored(num_before + num_ranks * num_new)
    return answers


def load(engine: SGLangEngine, prompt: list[int], **fields: Any) -> Answer:
    """Run a prompt that SGLang's own caches do not have."""
    engine.flush_cache()
    return generate(engine, prompt, **fields)


def logprobs(answer: Answer) -> list[float]:
    """Return the logarithms of the probabilities of an answer's tokens."""
    return [entry[0] for entry in answer.meta["output_token_logprobs"]]


class Reference:
    """Expected answers, computed by an engine without storage, each once."""

    def __init__(self, engine: SGLangEngine) -> None:
        self._engine = engine
        self._answers: dict[str, Answer] = {}

    def __call__(self, prompt: list[int], **fields: Any) -> Answer:
        """Return the expected answer."""
        key = json.dumps([prompt, fields], sort_keys=True)
        if key not in self._answers:
            self._answers[key] = generate(self._engine, prompt, **fields)
        return self._answers[key]

    def check(self, prompt: list[int], answer: Answer, **fields: Any) -> None:
        """Raise AssertionError unless the answer equals the expected answer."""
        expected = self(prompt, **fields)
        assert answer.tokens == expected.tokens
        assert logprobs(answer) == pytest.approx(logprobs(expected), abs=LOGPROB_TOLERANCE)


@contextlib.contextmanager
def reference(folder: Path, **arguments: Any) -> Iterator[Reference]:
    """Run an engine without storage for expected answers."""
    with serving(folder, **arguments) as engine:
        yield Reference(engine)


def other_weights(seed: int) -> Path:
    """Return a model with the configuration of the tiny Llama and other weights."""

    def save(target: Path) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig.from_pretrained(tiny_model.tiny_model())).float().save_pretrained(target)

    return tiny_model.cached_model(f"llama-seed{seed}", save, Path(tiny_model.__file__))


class Streams:
    """Clients that send prompts, one after another, and check the answers. A context manager, which stops
    them and raises the first error.
    """

    def __init__(self, engine: SGLangEngine, expected: Reference, prompts: Sequence[list[int]]) -> None:
        for prompt in prompts:
            expected(prompt)  # the engine of the reference should be idle later
        self._engine, self._expected, self._prompts = engine, expected, prompts
        self._is_over = threading.Event()
        self._errors: list[BaseException] = []
        self.answers: list[Answer] = []
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(8)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def wait(self, num_answers: int, is_wanted: Callable[[Answer], bool] = lambda _: True) -> list[Answer]:
        """Wait for more answers that are wanted. Returns all answers since the call."""
        begin = len(self.answers)

        def enough() -> bool:
            if self._errors:
                raise self._errors[0]
            return sum(map(is_wanted, self.answers[begin:])) >= num_answers

        wait_until(enough, timeout=240, what=f"{num_answers} answers")
        return self.answers[begin:]

    def _run(self, seed: int) -> None:
        choices = random.Random(seed)
        try:
            while not self._is_over.is_set():
                prompt = choices.choice(self._prompts)
                answer = generate(self._engine, prompt)
                self._expected.check(prompt, answer)
                self.answers.append(answer)
        except BaseException as error:  # pytest reports it in the test
            self._errors.append(error)
