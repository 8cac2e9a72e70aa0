"""Sidecars of pods on fake nodes, as processes, without engines.

kwok reports that pods run, and grants their resizes. Each running pod gets the sidecar that its containers
specify, at its own loopback address, where the operator finds it. The size in the pod's annotation is written
to the sidecar's file, as by a downward API volume.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lmcache_operator.specs import names
from testing.kube.api import Api, Object
from testing.kube.pod_processes import PodProcesses
from testing.processes import SidecarProcess

_SIZE_VARIABLE, _MAX_VARIABLE = "LMCACHE_MEMORY_SIZE_FILE", "LMCACHE_MEMORY_MAX_SIZE"
_SIZE_FILE = "memory-size"
_SIZE_ANNOTATION = "lmcache.io/memory-size"
_SIZE = "memory_size"
_FILE_OPTIONS = ("config", "socket", "arena")
"""Options with names of files in a pod."""


class PodSidecars(PodProcesses[SidecarProcess]):
    """A context manager that runs sidecars for the pods of an LMCacheCluster."""

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
        """``started`` is called in a thread with the name of a pod and its listening sidecar, whose memory is
        1/``scale`` of the pod's. ``options`` returns further options, or None if it is too early."""
        super().__init__(api, namespace, names.selector_text(cluster, names.ENGINE), addresses)
        self._started, self._scale, self._options = started, scale, options
        self.sizes: dict[str, list[tuple[float, str]]] = {}
        """Sizes in a pod's annotation, by the pod's uid, each with its first time in seconds since 1970."""

    def make(self, pod: Object, address: str) -> SidecarProcess | None:
        """See ``PodProcesses``."""
        containers = pod["spec"].get("initContainers", ())
        container = next((item for item in containers if item["name"] == names.SIDECAR), None)
        more_options = self._options()
        if container is None or more_options is None:
            return None
        flags = dict(flag.removeprefix("--").split("=", 1) for flag in container["args"] if "=" in flag)
        options = {
            name.replace("-", "_"): value for name, value in flags.items() if name not in _FILE_OPTIONS
        }
        options[_SIZE] = self._scaled(options[_SIZE])
        sidecar = SidecarProcess(**options, **more_options, http_host=address, http_port=names.SIDECAR_PORT)
        environment = {variable["name"]: variable.get("value", "") for variable in container.get("env", ())}
        sidecar.environment |= {k: v for k, v in environment.items() if k.startswith("LMCACHE_")}
        if _SIZE_VARIABLE in environment:
            sidecar.environment[_SIZE_VARIABLE] = str(sidecar.folder / _SIZE_FILE)
            sidecar.environment[_MAX_VARIABLE] = self._scaled(environment[_MAX_VARIABLE])
        self._write_size(pod, sidecar)
        return sidecar

    def started(self, pod: Object, process: SidecarProcess) -> None:
        """See ``PodProcesses``."""
        self._started(pod["metadata"]["name"], process)

    def follow(self, pod: Object) -> None:
        """See ``PodProcesses``."""
        self._write_size(pod, self.processes[pod["metadata"]["uid"]])

    def _write_size(self, pod: Object, sidecar: SidecarProcess) -> None:
        """Write the annotation to the file. The kubelet replaces the file as a whole."""
        size = (pod["metadata"].get("annotations") or {}).get(_SIZE_ANNOTATION, "")
        sizes = self.sizes.setdefault(pod["metadata"]["uid"], [])
        if not sizes or sizes[-1][1] != size:
            file = sidecar.folder / _SIZE_FILE
            new_file = file.with_suffix(".new")
            new_file.write_text(self._scaled(size) if size else "")
            new_file.replace(file)
            sizes.append((time.time(), size))

    def _scaled(self, num_bytes: str) -> str:
        return str(int(num_bytes) // self._scale)
