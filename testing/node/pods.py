"""Pods on a node: their containers, control groups, and requests to their engines and sidecars."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from testing.child_process import wait_until
from testing.kube.api import Object
from testing.node import groups
from testing.node.cluster import NodeCluster

ENGINE_PORT, SIDECAR_PORT = 8000, 9464
_REQUEST_SECONDS = 300
_SLICE_SECONDS = 0.01
_COMPUTING = ("VLLM::EngineCor", "VLLM::Worker", "sglang::schedul")  # the kernel keeps 15 characters


@dataclass(frozen=True)
class Completion:
    """The result of one request."""

    tokens: list[int]
    num_cached: int
    """Prompt tokens that were cached."""


class Pod:
    """A pod as it was when it was read."""

    def __init__(self, node: NodeCluster, obj: Object) -> None:
        self.node, self.object = node, obj
        self.name: str = obj["metadata"]["name"]
        self.namespace: str = obj["metadata"]["namespace"]
        self.uid: str = obj["metadata"]["uid"]

    @property
    def is_ready(self) -> bool:
        return is_ready(self.object)

    @property
    def address(self) -> str:
        address: str = self.object["status"]["podIP"]
        return address

    def container(self, name: str) -> Object:
        """The status of a container of any kind. Without a status, that of a container that never ran."""
        status = self.object["status"]
        statuses = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
        never_ran = {"name": name, "containerID": "", "restartCount": 0, "state": {}, "lastState": {}}
        return next((item for item in statuses if item["name"] == name), never_ran)

    def group(self, container: str, controller: str = "memory") -> Path:
        """The container's control group. Raises FileNotFoundError if it does not run."""
        container_id = self.container(container)["containerID"].rpartition("/")[2]
        return groups.of_container(self.node.group, container_id, controller)

    def kill(self, container: str) -> None:
        """Send SIGKILL to all processes of the container. The kubelet restarts it."""
        self.node.kill_container(self.container(container)["containerID"])

    @contextlib.contextmanager
    def stopped(self, container: str, *, but_first: bool = False) -> Iterator[None]:
        """Stop all processes of the container inside the context, or all but its first process, which gets
        the signals of the kubelet. Remaining processes continue afterwards.
        """
        processes = self._processes(container)
        with _stopped(process for process in processes if not (but_first and _is_first(process))):
            yield

    @contextlib.contextmanager
    def stopped_during(
        self, threads: Executor, prompt: list[int], max_tokens: int, *, but_first: bool = False
    ) -> Iterator[Future[Completion]]:
        """Run a completion, and stop the engine inside the context, as `stopped` does. The request has a
        token, but not all.

        A busy API server can be later with the first token than the engine with the last one. So the
        processes that compute run for a hundredth of a second at a time until the token arrives. In between,
        the other processes pass on what was computed, until all of them sleep.
        """
        has_begun = threading.Event()
        processes = self._processes("engine")
        computing = [*filter(_computes, processes)]
        serving = [process for process in processes if process not in computing]
        assert computing, "no process of the engine has a known title"
        began = time.monotonic()
        with _stopped(computing):
            with _real_time():
                request = threads.submit(complete, self.address, prompt, max_tokens, has_begun.set)
                request.add_done_callback(lambda _: has_begun.set())  # also after an error
                # The client may need longer, too: the pauses grow to a quarter of the time that has passed.
                while not has_begun.wait(max(9 * _SLICE_SECONDS, (time.monotonic() - began) / 4)):
                    with _continued(computing):
                        has_begun.wait(_SLICE_SECONDS)
                    wait_until(lambda: has_begun.is_set() or all(map(_sleeps, serving)))
            with self.stopped("engine", but_first=but_first):
                if request.done():
                    seconds = time.monotonic() - began
                    raise AssertionError(f"the request ended within {seconds:.1f} s: {request.result()}")
                yield request

    def _processes(self, container: str) -> list[str]:
        return (self.group(container) / "cgroup.procs").read_text().split()

    def exec(self, container: str, *argv: str) -> str:
        """Standard output of a command in the container. Raises CalledProcessError."""
        return self.node.kubectl("exec", "-n", self.namespace, self.name, "-c", container, "--", *argv)

    def logs(self, container: str, *flags: str) -> str:
        return self.node.kubectl("logs", "-n", self.namespace, self.name, "-c", container, *flags)

    def stats(self) -> Any:
        """The sidecar's /stats. Raises OSError if it does not answer."""
        return json.loads(self.get(SIDECAR_PORT, "/stats"))

    def get(self, port: int, path: str) -> bytes:
        """The body of a page. Raises OSError."""
        with urllib.request.urlopen(f"http://{self.address}:{port}{path}", timeout=30) as answer:
            body: bytes = answer.read()
        return body

    def reset_engine_cache(self) -> None:
        """Empty the engine's own prefix cache, so that only the sidecar can hit."""
        url = f"http://{self.address}:{ENGINE_PORT}/reset_prefix_cache"
        urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60).close()

    def complete(
        self, prompt: list[int], max_tokens: int = 8, *, salt_header: str = "", **body: Any
    ) -> Completion:
        """Run a greedy streamed completion, with a salt in the header of the gateway, and further fields in
        the body. Raises OSError, also when the stream ends early.
        """
        headers = {"X-LMCache-Tenant": salt_header} if salt_header else {}
        return complete(self.address, prompt, max_tokens, headers=headers, body=body)


@contextlib.contextmanager
def _stopped(processes: Iterable[str]) -> Iterator[None]:
    stopped = [*processes]
    _signal(stopped, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(stopped, signal.SIGCONT)


@contextlib.contextmanager
def _continued(processes: list[str]) -> Iterator[None]:
    """Let stopped processes run inside the context."""
    _signal(processes, signal.SIGCONT)
    try:
        yield
    finally:
        _signal(processes, signal.SIGSTOP)


@contextlib.contextmanager
def _real_time() -> Iterator[None]:
    """Let this thread, and threads that it starts, wait for no core. On busy cores, a hundredth of a second
    would otherwise take a tenth. Without the right to do so, nothing changes.
    """
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)


def _computes(process: str) -> bool:
    """Whether a process of vLLM or SGLang computes tokens, by its title."""
    with contextlib.suppress(FileNotFoundError):  # the process has ended
        return Path(f"/proc/{process}/comm").read_text().startswith(_COMPUTING)
    return False


def _sleeps(process: str) -> bool:
    """Whether no thread of a process runs, or waits for a core or the disk."""
    states = []
    for path in Path(f"/proc/{process}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended
            states.append(path.read_text().rpartition(")")[2].split()[0])
    return set(states) <= {"S"}


def _is_first(process: str) -> bool:
    """Whether a process is the first one in its PID namespace."""
    with contextlib.suppress(FileNotFoundError):  # the process has ended
        ids = Path(f"/proc/{process}/status").read_text().partition("\nNSpid:")[2].splitlines()[0]
        return ids.split()[-1] == "1"
    return False


def _signal(processes: Iterable[str], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process), number)


def is_ready(pod: Object) -> bool:
    """Whether the pod is Ready and not terminating."""
    conditions = pod["status"].get("conditions", [])
    is_terminating = "deletionTimestamp" in pod["metadata"]
    return not is_terminating and any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def complete(
    host: str,
    prompt: list[int],
    max_tokens: int = 8,
    on_first_token: Callable[[], None] = lambda: None,
    *,
    headers: Mapping[str, str] = MappingProxyType({}),
    body: Mapping[str, Any] = MappingProxyType({}),
) -> Completion:
    """Run a greedy streamed completion on the engine or Service at ``host``; see `Pod.complete`.

    ``headers`` and ``body`` have further fields of the request.
    """
    fields = {
        "model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    request = urllib.request.Request(
        f"http://{host}:{ENGINE_PORT}/v1/completions",
        json.dumps({**fields, **body}).encode(),
        {"Content-Type": "application/json", **headers},
    )
    has_begun, usage = False, None
    tokens: list[int] = []
    with urllib.request.urlopen(request, timeout=_REQUEST_SECONDS) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            for choice in event["choices"]:
                if not has_begun:
                    has_begun = True
                    on_first_token()
                tokens += choice["token_ids"] or []
            usage = event.get("usage") or usage
    if usage is None:
        raise OSError(f"the stream ended after {len(tokens)} of {max_tokens} tokens")
    num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Completion(tokens, num_cached)
