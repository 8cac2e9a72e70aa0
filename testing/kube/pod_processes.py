"""Processes for pods on fake nodes, where kwok only reports that pods run."""

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
    """A process that can be started; see ``testing.child_process``."""

    def start(self) -> None: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


P = TypeVar("P", bound=Startable)


class PodProcesses(ABC, Generic[P]):
    """A context manager that runs a process for each pod, at an address of its own."""

    def __init__(self, api: Api, namespace: str, selector: str, addresses: Iterator[str]) -> None:
        """``addresses`` are loopback addresses that nothing else uses."""
        self.api, self.namespace = api, namespace
        self._selector, self._addresses = selector, addresses
        self.processes: dict[str, P] = {}
        """Processes by the uid of their pod."""
        self._listening: dict[str, tuple[str, str]] = {}
        """Name and address by uid, of pods whose process listens."""
        self._assigned: dict[str, str] = {}
        """Addresses by uid, also of pods without a process."""
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
        """Create a pod's process, which listens once started. None if it is too early, to be called again."""

    def started(self, pod: Object, process: P) -> None:
        """Called in a thread when the process listens."""

    def follow(self, pod: Object) -> None:
        """Update the files of a pod with a process, as a kubelet does."""

    def look(self) -> None:
        """Update files for all pods, as a kubelet does."""

    @property
    def num_running(self) -> int:
        """Number of processes that listen. Raises like ``check``."""
        self.check()
        return len(self._listening)

    @property
    def addresses(self) -> dict[str, str]:
        """Addresses of listening processes, by the name of their pod."""
        return dict(self._listening.values())

    def check(self) -> None:
        """Raise the error of the thread, or `ProcessDied` if a process ended by itself."""
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
        live = {pod["metadata"]["uid"]: pod for pod in pods if "deletionTimestamp" not in pod["metadata"]}
        for uid in self.processes.keys() - live.keys():
            self._listening.pop(uid)
            self.processes.pop(uid).close()
        for uid, pod in live.items():
            if pod.get("status", {}).get("phase") == "Running" and uid not in self.processes:
                self._start(uid, pod)
            if uid in self.processes:
                self.follow(pod)
        self.look()

    def _start(self, uid: str, pod: Object) -> None:
        name = pod["metadata"]["name"]
        if uid not in self._assigned:
            self._assigned[uid] = next(self._addresses)
        address = self._assigned[uid]
        process = self.make(pod, address)
        if process is None:
            return
        self.processes[uid] = process
        process.start()
        self.started(pod, process)
        self._listening[uid] = name, address
        running = {"podIP": address, "podIPs": [{"ip": address}]}
        try:
            self.api.patch("v1/pods", f"{name}/status", {"status": running}, self.namespace)
        except ApiError as error:
            if error.code != HTTPStatus.NOT_FOUND:  # the pod was deleted meanwhile
                raise
