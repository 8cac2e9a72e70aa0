"""Find programs of Debian packages, and install missing ones as root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping


class PackagesError(RuntimeError):
    """Packages are missing and can't be installed here. The message says which command to run."""


def install(commands: Mapping[str, str]) -> None:
    """Install the packages of missing commands.

    ``commands``: the Debian package of each command, or of each file by its absolute path. Raises
    `PackagesError`.
    """
    missing = sorted({package for command, package in commands.items() if not shutil.which(command)})
    if not missing:
        return
    by_hand = f"run: sudo apt-get install {' '.join(missing)}"
    if os.geteuid() or not shutil.which("apt-get"):
        raise PackagesError(f"Debian packages are missing and only root can install them; {by_hand}")
    print(f"[setup] installing Debian packages: {' '.join(missing)}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for argv in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *missing]):
        done = subprocess.run(["apt-get", *argv], env=environment, capture_output=True, text=True)
        if done.returncode:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-10:])
            raise PackagesError(f"apt-get {argv[0]} failed; {by_hand}\n{tail}")
