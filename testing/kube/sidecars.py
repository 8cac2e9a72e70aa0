"""Sidecars of pods that are on fake nodes, as processes: what a kubelet would do for them, and no engine.

kwok says that pods run, and grants their resizes. Here each pod that is to run gets the sidecar that its own
containers ask for, at an address of its own on loopback, where the operator finds it; and its annotation's
size reaches the sidecar's file, as through a downward API volume.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from lmcache_operator.specs import names

from testing.kube.api import Api, Object
from testing.processes import SidecarProcess

_LOOK_SECONDS = 0.2
_SIZE_VARIABLE = "LMCACHE_MEMORY_SIZE_FILE"
_SIZE_FILE = "memory-size"
_SIZE_ANNOTATION = "lmcache.io/memory-size"
_PLACES = ("config", "socket", "arena")
"""Options that name files in a pod."""


class PodSidecars:
    """A context manager: while it is open, pods of an LMCacheCluster have sidecars."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        cluster: str,
        addresses: Iterator[str],
        started: Callable[[str, SidecarProcess], None],
    ) -> None:
        """``started`` is called in a thread with a pod's name and its sidecar, which listens."""
        self._api, self._namespace, self._selector = api, namespace, f"lmcache.io/cluster={cluster}"
        self._addresses, self._started = addresses, started
        self._sidecars: dict[str, SidecarProcess] = {}
        self.sizes: dict[str, list[tuple[float, str]]] = {}
        """By uid of a pod: what its annotation said, and since when (seconds since 1970)."""
        self._num_running = 0
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="sidecars of pods")

    def __enter__(self) -> PodSidecars:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        for sidecar in self._sidecars.values():
            sidecar.close()

    @property
    def num_running(self) -> int:
        """Sidecars that listen. Raises as ``check`` does."""
        self.check()
        return self._num_running

    def check(self) -> None:
        """Raises what went wrong, and `ProcessDied` for a sidecar that ended by itself."""
        if self._failure is not None:
            raise self._failure
        for sidecar in list(self._sidecars.values()):
            sidecar.check()

    def _run(self) -> None:
        try:
            while not self._stop.wait(_LOOK_SECONDS):
                self._look()
        except BaseException as error:
            self._failure = error

    def _look(self) -> None:
        try:
            pods = self._api.objects("v1/pods", self._namespace, self._selector)
        except OSError:
            return
        found = {pod["metadata"]["uid"]: pod for pod in pods if "deletionTimestamp" not in pod["metadata"]}
        for uid in self._sidecars.keys() - found.keys():
            self._sidecars.pop(uid).close()
            self._num_running -= 1
        for uid, pod in found.items():
            container = next(
                (c for c in pod["spec"].get("initContainers", ()) if c["name"] == names.SIDECAR), None
            )
            if container is None or pod.get("status", {}).get("phase") != "Running":
                continue
            if uid not in self._sidecars:
                self._start(uid, pod, container)
            self._hand_over(uid, pod)

    def _start(self, uid: str, pod: Object, container: Object) -> None:
        address = next(self._addresses)
        flags = dict(flag.removeprefix("--").split("=", 1) for flag in container["args"] if "=" in flag)
        options = {name.replace("-", "_"): value for name, value in flags.items() if name not in _PLACES}
        sidecar = SidecarProcess(**options, http_host=address, http_port=names.SIDECAR_PORT)
        environment = {variable["name"]: variable.get("value", "") for variable in container.get("env", ())}
        sidecar.environment |= {k: v for k, v in environment.items() if k.startswith("LMCACHE_")}
        if _SIZE_VARIABLE in environment:
            sidecar.environment[_SIZE_VARIABLE] = str(sidecar.folder / _SIZE_FILE)
        self._sidecars[uid] = sidecar
        self._hand_over(uid, pod)
        sidecar.start()
        running = {"podIP": address, "podIPs": [{"ip": address}]}
        name = pod["metadata"]["name"]
        self._api.patch("v1/pods", f"{name}/status", {"status": running}, self._namespace)
        self._started(name, sidecar)
        self._num_running += 1

    def _hand_over(self, uid: str, pod: Object) -> None:
        """The annotation as the file; the kubelet replaces it whole."""
        size = (pod["metadata"].get("annotations") or {}).get(_SIZE_ANNOTATION, "")
        told = self.sizes.setdefault(uid, [])
        if not told or told[-1][1] != size:
            file = self._sidecars[uid].folder / _SIZE_FILE
            fresh = file.with_suffix(".new")
            fresh.write_text(size)
            fresh.replace(file)
            told.append((time.time(), size))
