"""The containerd process, and its cache of unpacked images."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from testing.kube.process import Component
from testing.node import inside, requirements

ROOT, STATE = Path("/var/lib/containerd"), Path("/run/containerd")
SOCKET = STATE / "containerd.sock"
CDI = Path("/run/cdi")
"""Folder with CDI files, in which device drivers describe devices for containers."""
_NETWORKS = Path("/run/cni/net.d")
_CONFIG = """
version = 3
disabled_plugins = [
  'io.containerd.snapshotter.v1.btrfs', 'io.containerd.snapshotter.v1.zfs', 'io.containerd.nri.v1.nri',
  'io.containerd.snapshotter.v1.devmapper', 'io.containerd.snapshotter.v1.erofs',
  'io.containerd.internal.v1.opt', 'io.containerd.tracing.processor.v1.otlp',
]
[timeouts]
  # By default, containerd gives up after 2 s when it stops a container, and kills it after its grace period.
  'io.containerd.timeout.task.state' = '60s'
  'io.containerd.timeout.shim.load' = '60s'
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = '{pause}'
[plugins.'io.containerd.cri.v1.runtime']
  # In a container of some CI, root may not lower a process's OOM score.
  restrict_oom_score_adj = true
  disable_apparmor = true
  cdi_spec_dirs = ['{cdi}']
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = 'io.containerd.runc.v2'
    runtime_path = '{shim}'
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ['{plugins}']
    conf_dir = '{networks}'
"""


class Containerd(Component):
    """The container runtime. ``pause`` is the image that holds the namespaces of a pod."""

    def __init__(self, bin_dir: Path, log: Path, pause: str) -> None:
        self._ctr = bin_dir / "ctr"
        self._config = log.with_suffix(".toml")
        super().__init__("containerd", [bin_dir / "containerd", "--config", self._config], log)
        self._config.write_text(
            _CONFIG.format(
                pause=pause,
                cdi=CDI,
                shim=bin_dir / "containerd-shim-runc-v2",
                plugins=requirements.CNI_PLUGINS,
                networks=_NETWORKS,
            )
        )
        _NETWORKS.mkdir(parents=True, exist_ok=True)
        (_NETWORKS / "10-bridge.conflist").write_text(json.dumps(_network()))

    def ctr(self, *argv: str | Path) -> str:
        """Standard output of containerd's own client. Raises CalledProcessError."""
        command = [self._ctr, "--address", SOCKET, "--namespace", "k8s.io", *argv]
        return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout

    def is_serving(self) -> bool:
        self.check()
        try:
            self.ctr("version")
        except subprocess.CalledProcessError:
            return False
        return True

    def forget_containers(self) -> bool:
        """Remove containers of an earlier run. Returns whether there were any, which requires a restart."""
        containers = self.ctr("containers", "ls", "-q").split()
        sandboxes = [line.split()[0] for line in self.ctr("sandboxes", "ls").splitlines()[1:]]
        if containers:
            self.ctr("containers", "rm", *containers)
        if sandboxes:
            self.ctr("sandboxes", "rm", "--force", *sandboxes)
        return bool(containers or sandboxes)

    def import_image(self, archive: Path) -> None:
        """Load an image archive once. Another content must have another file name or size."""
        names = _names(archive)
        present = set(self.ctr("images", "ls", "-q").split())
        stamp = ROOT / "imported" / names[0].replace("/", "_")
        content = [f"{archive.name} {archive.stat().st_size}", *names]
        old = stamp.read_text().splitlines() if stamp.exists() else []
        if old == content and set(names) <= present:
            return
        # containerd also makes the image's ID a name, but only for names that it did not know. Mounted images
        # are looked up by their ID.
        if replaced := present.intersection([*names, *old[1:]]):
            self.ctr("images", "rm", "--sync", *sorted(replaced))
        self.ctr("images", "import", "--local", archive)
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text("\n".join(content))


def _network() -> dict[str, Any]:
    addresses = [[{"subnet": inside.PODS, "rangeStart": "10.88.0.10", "gateway": inside.ADDRESS}]]
    ipam = {
        "type": "host-local", "ranges": addresses, "dataDir": "/run/cni/addresses",
        "routes": [{"dst": "0.0.0.0/0"}],
    }  # fmt: skip
    bridge = {
        "type": "bridge", "bridge": inside.BRIDGE, "isGateway": True, "hairpinMode": True, "ipam": ipam,
    }  # fmt: skip
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge]}


def _names(archive: Path) -> list[str]:
    """Names of the image in a Docker archive, and its ID."""
    with tarfile.open(archive) as tar:
        manifest = tar.extractfile("manifest.json")
        assert manifest is not None
        image = json.load(manifest)[0]
    return [*image["RepoTags"], f"sha256:{Path(image['Config']).stem}"]
