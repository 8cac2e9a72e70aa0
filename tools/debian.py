"""Programs that come as Debian packages: found, or installed when this is root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping


class PackagesError(RuntimeError):
    """Packages are missing and can't be installed here; the message says what to run."""


def install(commands: Mapping[str, str]) -> None:
    """Sees to it that every command (or file, by its absolute path) is there; its value names the package
    that has it. Raises `PackagesError`.
    """
    missing = sorted({package for command, package in commands.items() if not shutil.which(command)})
    if not missing:
        return
    by_hand = f"run: sudo apt-get install {' '.join(missing)}"
    if os.geteuid() or not shutil.which("apt-get"):
        raise PackagesError(f"these Debian packages are missing and only root can install them; {by_hand}")
    print(f"[setup] installing Debian packages: {' '.join(missing)}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for argv in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *missing]):
        done = subprocess.run(["apt-get", *argv], env=environment, capture_output=True, text=True)
        if done.returncode:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-10:])
            raise PackagesError(f"apt-get {argv[0]} failed; {by_hand}\n{tail}")
