"""Sidecars of pods that are on fake nodes, as processes, and no engine.

kwok says that pods run, and grants their resizes. Here each pod that is to run gets the sidecar that its own
containers ask for, at an address of its own on loopback, where the operator finds it; and its annotation's
size reaches the sidecar's file, as through a downward API volume.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lmcache_operator.specs import names

from testing.kube.api import Api, Object
from testing.kube.pod_processes import PodProcesses
from testing.processes import SidecarProcess

_SIZE_VARIABLE, _MOST_VARIABLE = "LMCACHE_MEMORY_SIZE_FILE", "LMCACHE_MEMORY_MAX_SIZE"
_SIZE_FILE = "memory-size"
_SIZE_ANNOTATION = "lmcache.io/memory-size"
_SIZE = "memory_size"
_PLACES = ("config", "socket", "arena")
"""Options that name files in a pod."""


class PodSidecars(PodProcesses[SidecarProcess]):
    """A context manager: while it is open, pods of an LMCacheCluster have sidecars."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        cluster: str,
        addresses: Iterator[str],
        started: Callable[[str, SidecarProcess], None],
        *,
        scale: int = 1,
        options: Callable[[], Mapping[str, Any] | None] = dict,
    ) -> None:
        """``started`` is called in a thread with a pod's name and its sidecar, which listens. Its memory is
        ``scale`` times as small as the pod's. ``options``: more of them; None: not yet."""
        super().__init__(api, namespace, names.selector_text(cluster, names.ENGINE), addresses)
        self._started, self._scale, self._options = started, scale, options
        self.sizes: dict[str, list[tuple[float, str]]] = {}
        """By uid of a pod: what its annotation said, and since when (seconds since 1970)."""

    def make(self, pod: Object, address: str) -> SidecarProcess | None:
        """See ``PodProcesses``."""
        containers = pod["spec"].get("initContainers", ())
        container = next((one for one in containers if one["name"] == names.SIDECAR), None)
        more = self._options()
        if container is None or more is None:
            return None
        flags = dict(flag.removeprefix("--").split("=", 1) for flag in container["args"] if "=" in flag)
        options = {name.replace("-", "_"): value for name, value in flags.items() if name not in _PLACES}
        options[_SIZE] = self._scaled(options[_SIZE])
        sidecar = SidecarProcess(**options, **more, http_host=address, http_port=names.SIDECAR_PORT)
        environment = {variable["name"]: variable.get("value", "") for variable in container.get("env", ())}
        sidecar.environment |= {k: v for k, v in environment.items() if k.startswith("LMCACHE_")}
        if _SIZE_VARIABLE in environment:
            sidecar.environment[_SIZE_VARIABLE] = str(sidecar.folder / _SIZE_FILE)
            sidecar.environment[_MOST_VARIABLE] = self._scaled(environment[_MOST_VARIABLE])
        self._hand_over(pod, sidecar)
        return sidecar

    def started(self, pod: Object, process: SidecarProcess) -> None:
        """See ``PodProcesses``."""
        self._started(pod["metadata"]["name"], process)

    def follow(self, pod: Object) -> None:
        """See ``PodProcesses``."""
        self._hand_over(pod, self.processes[pod["metadata"]["uid"]])

    def _hand_over(self, pod: Object, sidecar: SidecarProcess) -> None:
        """The annotation as the file; the kubelet replaces it whole."""
        size = (pod["metadata"].get("annotations") or {}).get(_SIZE_ANNOTATION, "")
        told = self.sizes.setdefault(pod["metadata"]["uid"], [])
        if not told or told[-1][1] != size:
            file = sidecar.folder / _SIZE_FILE
            fresh = file.with_suffix(".new")
            fresh.write_text(self._scaled(size) if size else "")
            fresh.replace(file)
            told.append((time.time(), size))

    def _scaled(self, num_bytes: str) -> str:
        return str(int(num_bytes) // self._scale)
