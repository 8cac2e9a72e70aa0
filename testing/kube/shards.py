"""Servers of a managed remote tier as processes: the containers of their pods without a container runtime."""

from __future__ import annotations

import base64
import itertools
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lmcache_operator.components.remote.shards import ShardCounts
from lmcache_operator.specs import names, paths
from testing.child_process import ChildProcess, wait_until
from testing.kube.api import Api, ApiError, Object
from testing.kube.pod_processes import PodProcesses

_RUN_DIR = "/run/lmcache"
_ANNOTATION = "lmcache.io/shards"
_MAX_MEMORY = re.compile(r"^maxmemory (\d+)$", re.MULTILINE)
_ENDPOINT = re.compile(rf"(?<=^- )([^.\s]+)\.\S+(?=:{names.REMOTE_PORT}$)", re.MULTILINE)


class MountedSecret:
    """A folder as the kubelet mounts it: all of its files change at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._versions = itertools.count()
        folder.mkdir()

    def write(self, **files: str) -> None:
        new = self.folder / f"..{next(self._versions)}"
        new.mkdir()
        for name, text in files.items():
            (new / name).write_text(text)
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")
        (new / "link").symlink_to(new)
        (new / "link").replace(self.folder / "..data")


class ShardProcess(ChildProcess):
    """The container of a shard's pod, run as a process."""

    def __init__(
        self, folder: Path, container: Object, *, has_tls: bool = False, replaced: Mapping[str, str]
    ) -> None:
        """``replaced`` are texts in the command and arguments with their replacements."""
        super().__init__("shard", folder / "log")
        self.folder = folder
        self.auth, self.tls = MountedSecret(folder / "auth"), MountedSecret(folder / "tls")
        (folder / "run").mkdir()
        replacements = {_RUN_DIR: f"{folder / 'run'}", paths.REMOTE_AUTH_DIR: f"{folder / 'auth'}"}
        replacements[paths.REMOTE_TLS_DIR] = f"{folder / ('tls' if has_tls else 'none')}"
        # Escapes in arguments: https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/
        replacements |= {"$$": "$", **replaced}

        def replace_texts(word: str) -> str:
            for text, replacement in replacements.items():
                word = word.replace(text, replacement)
            return word

        self.argv = [replace_texts(word) for word in [*container["command"], *container["args"]]]
        self.probe = [replace_texts(word) for word in container["livenessProbe"]["exec"]["command"]]

    def start(self) -> None:
        self.spawn(self.argv)
        wait_until(self.is_alive, timeout=60)

    def is_alive(self) -> bool:
        """Whether the kubelet's probe succeeds. Raises like ``check``."""
        self.check()
        return subprocess.run(self.probe, capture_output=True, timeout=60, check=False).returncode == 0


class _TemporaryShard(ShardProcess):
    def close(self) -> None:
        super().close()
        shutil.rmtree(self.folder, ignore_errors=True)


class PodShards(PodProcesses[ShardProcess]):
    """A context manager that runs servers for pods of shards, and writes their addresses for sidecars."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        cluster: str,
        addresses: Iterator[str],
        folder: Path,
        *,
        scale: int = 1,
    ) -> None:
        """``folder`` holds the files that sidecars mount. Servers store 1/``scale`` of their pods' memory."""
        super().__init__(api, namespace, names.selector_text(cluster, names.REMOTE), addresses)
        self._name, self._folder, self._scale = names.object_name(cluster, names.REMOTE), folder, scale
        self._list = ""
        self.numbers: list[tuple[float, int]] = []
        """Number of shards in the list of sidecars, with the time since when (seconds since 1970)."""

    def options(self) -> dict[str, Any] | None:
        """Options of sidecars. None if there is no list yet."""
        if not self._list:
            return None
        address = next(iter(self.addresses.values()))
        return {
            "remote_url": f"redis://{names.REMOTE_USER}@{address}:{names.REMOTE_PORT}",
            "remote_shards_file": self._folder / paths.SHARDS_FILE,
            "remote_password_file": self._folder / "password",
        }

    def make(self, pod: Object, address: str) -> ShardProcess:
        """See ``PodProcesses``."""
        (container,) = pod["spec"]["containers"]
        (match,) = (match for word in container["args"] if (match := _MAX_MEMORY.search(word)))
        replaced = {
            match[0]: f"maxmemory {int(match[1]) // self._scale}",
            f"port {names.REMOTE_PORT}": f"port {names.REMOTE_PORT}\nbind {address}",
            "sleep 10": "sleep 1",
        }
        (volume,) = (each for each in pod["spec"]["volumes"] if each["name"] == "auth")
        name = volume["projected"]["sources"][0]["secret"]["name"]
        secret = self.api.get("v1/secrets", name, self.namespace)["data"]["password"]
        password = base64.b64decode(secret).decode()
        (self._folder / "password").write_text(password)
        server = _TemporaryShard(Path(tempfile.mkdtemp(prefix="lmc-shard-")), container, replaced=replaced)
        server.auth.write(password=password)
        return server

    def look(self) -> None:
        """See ``PodProcesses``. Does not write a list with a server that does not listen yet."""
        try:
            config = self.api.get("v1/configmaps", self._name, self.namespace)
        except (ApiError, OSError):
            return
        text, addresses = config["data"][paths.SHARDS_FILE], self.addresses
        shards = ShardCounts.parse(names.annotations_of(config)[_ANNOTATION])
        are_listening = {match[1] for match in _ENDPOINT.finditer(text)} <= addresses.keys()
        if shards is None or text == self._list or not are_listening:
            return
        file = self._folder / paths.SHARDS_FILE
        file.with_suffix(".new").write_text(_ENDPOINT.sub(lambda match: addresses[match[1]], text))
        file.with_suffix(".new").replace(file)
        self._list = text
        if not self.numbers or self.numbers[-1][1] != shards.current:
            self.numbers.append((time.time(), shards.current))
