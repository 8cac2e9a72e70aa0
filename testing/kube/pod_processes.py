"""Processes for pods that are on fake nodes: what a kubelet would do for them, where kwok only says that they
run.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from http import HTTPStatus
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from testing.kube.api import Api, ApiError, Object

_LOOK_SECONDS = 0.2


class Startable(Protocol):
    """A process that is not there yet; see ``testing.child_process``."""

    def start(self) -> None: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


P = TypeVar("P", bound=Startable)


class PodProcesses(ABC, Generic[P]):
    """A context manager: while it is open, pods have a process of ours, at an address of their own."""

    def __init__(self, api: Api, namespace: str, selector: str, addresses: Iterator[str]) -> None:
        """``addresses``: on loopback, and nobody else's."""
        self.api, self.namespace = api, namespace
        self._selector, self._addresses = selector, addresses
        self.processes: dict[str, P] = {}
        """By uid of the pod."""
        self._places: dict[str, tuple[str, str]] = {}
        self._given: dict[str, str] = {}  # addresses by uid, of pods that have to wait, too
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"processes of {selector}")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        for process in self.processes.values():
            process.close()

    @abstractmethod
    def make(self, pod: Object, address: str) -> P | None:
        """A pod's process, which will listen when it was started; None: not yet, ask again."""

    def started(self, pod: Object, process: P) -> None:
        """It listens; called in a thread."""

    def follow(self, pod: Object) -> None:
        """Bring what a kubelet brings of a pod that has its process."""

    def look(self) -> None:
        """Bring what a kubelet brings of all."""

    @property
    def num_running(self) -> int:
        """Processes that listen. Raises as ``check`` does."""
        self.check()
        return len(self._places)

    @property
    def addresses(self) -> dict[str, str]:
        """Of those that listen, by the names of their pods."""
        return dict(self._places.values())

    def check(self) -> None:
        """Raises what went wrong, and `ProcessDied` for a process that ended by itself."""
        if self._failure is not None:
            raise self._failure
        for process in list(self.processes.values()):
            process.check()

    def _run(self) -> None:
        try:
            while not self._stop.wait(_LOOK_SECONDS):
                self._look()
        except BaseException as error:
            self._failure = error

    def _look(self) -> None:
        try:
            pods = self.api.objects("v1/pods", self.namespace, self._selector)
        except OSError:
            return
        found = {pod["metadata"]["uid"]: pod for pod in pods if "deletionTimestamp" not in pod["metadata"]}
        for uid in self.processes.keys() - found.keys():
            self._places.pop(uid)
            self.processes.pop(uid).close()
        for uid, pod in found.items():
            if pod.get("status", {}).get("phase") == "Running" and uid not in self.processes:
                self._begin(uid, pod)
            if uid in self.processes:
                self.follow(pod)
        self.look()

    def _begin(self, uid: str, pod: Object) -> None:
        name = pod["metadata"]["name"]
        if uid not in self._given:
            self._given[uid] = next(self._addresses)
        address = self._given[uid]
        process = self.make(pod, address)
        if process is None:
            return
        self.processes[uid] = process
        process.start()
        self.started(pod, process)
        self._places[uid] = name, address
        running = {"podIP": address, "podIPs": [{"ip": address}]}
        try:
            self.api.patch("v1/pods", f"{name}/status", {"status": running}, self.namespace)
        except ApiError as error:
            if error.code != HTTPStatus.NOT_FOUND:  # gone meanwhile
                raise
