"""Environments with peers' packages from the registry, and child programs that run in them.

The environments are in the cache directory. They use the project's torch, so that both sides run the same
one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from tools.cache import cache_root, uv

CHILDREN = Path(__file__).parent
# A separate torch would take 3 GB per environment. 0.3.0 gets only the packages that the measured code needs.
NEEDS = {
    "0.3.0": ["--no-deps", "lmcache==0.3.0", "nvtx", "sortedcontainers", "aiofiles", "setuptools<80"],
    "0.5.6": ["--excludes", str(CHILDREN / "excluded.txt"), "lmcache==0.5.6"],
}


def environment(version: str) -> Path:
    """Return the Python of a peer's environment. The first call creates the environment."""
    digest = hashlib.sha256(" ".join(NEEDS[version][-1:]).encode()).hexdigest()[:8]
    folder = cache_root() / f"peer-{version}-{digest}"
    python = folder / "bin" / "python"
    stamp = folder / "made"
    if not stamp.exists():
        print(f"installing lmcache {version} into {folder}", file=sys.stderr, flush=True)
        make = [uv(), "venv", "--quiet", "--allow-existing", "--python", sys.executable, folder]
        subprocess.run(make, check=True)
        install = [uv(), "pip", "install", "--quiet", "--python", python, *NEEDS[version]]
        subprocess.run(install, check=True, env={**os.environ, "NO_CUDA_EXT": "1"})
        stamp.touch()
    # Each time, because another checkout may have made the environment.
    site = sysconfig.get_path("purelib", vars={"base": str(folder)})
    Path(site, "zz_torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def site_packages(version: str) -> Path:
    """Return the directory of the peer's packages."""
    return Path(sysconfig.get_path("purelib", vars={"base": str(environment(version).parent.parent)}))


class Peer:
    """A child program that runs one round per line of input."""

    def __init__(self, version: str, script: str, *arguments: object) -> None:
        command = [environment(version), "-W", "ignore", CHILDREN / script, *map(str, arguments)]
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ, cwd=CHILDREN
        )

    def round(self) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):  # the peer also logs to stdout
                seconds: dict[str, float] = json.loads(line)
                return seconds
        raise RuntimeError(f"the peer ended with status {self._process.wait()}")

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        """End the input, so that the child cleans up. A killed child would leave its shared memory."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.stdin.close()
            self._process.wait(20)
        self._process.kill()
        self._process.wait()
