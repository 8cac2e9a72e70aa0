"""Find programs of Debian packages, and install missing ones as root.

``python -m tools.debian PACKAGE...`` installs packages, also next to another program that does so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

_LOCK_SECONDS, _PAUSE_SECONDS = 300, 5
_LOCKED = "Could not get lock"


class PackagesError(RuntimeError):
    """Packages are missing and can't be installed here. The message says which command to run."""


def install(commands: Mapping[str, str]) -> None:
    """Install the packages of missing commands.

    ``commands``: the Debian package of each command, or of each file by its absolute path. Raises
    `PackagesError`.
    """
    missing = sorted({package for command, package in commands.items() if not shutil.which(command)})
    if missing:
        install_packages(missing)


def install_packages(missing: Sequence[str]) -> None:
    """Install packages. If another program holds a lock of apt, wait for at most five minutes.

    Raises `PackagesError`.
    """
    by_hand = f"run: sudo apt-get install {' '.join(missing)}"
    if os.geteuid() or not shutil.which("apt-get"):
        raise PackagesError(f"Debian packages are missing and only root can install them; {by_hand}")
    print(f"[setup] installing Debian packages: {' '.join(missing)}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    for argv in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *missing]):
        deadline = time.monotonic() + _LOCK_SECONDS
        command = ["apt-get", "-o", f"DPkg::Lock::Timeout={_LOCK_SECONDS}", *argv]
        while True:
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            # With the option, apt waits for the lock of dpkg, but not for that of its lists.
            if not done.returncode or _LOCKED not in done.stderr or time.monotonic() >= deadline:
                break
            print("[setup] another program uses apt: waiting for its lock", flush=True)
            time.sleep(_PAUSE_SECONDS)
        if done.returncode:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-10:])
            raise PackagesError(f"apt-get {argv[0]} failed; {by_hand}\n{tail}")


def main(packages: Sequence[str]) -> int:
    """Install packages. Returns the exit status."""
    try:
        install_packages(packages)
    except PackagesError as error:
        print(f"[setup] {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
