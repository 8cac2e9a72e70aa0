"""Atheris, the coverage-guided fuzzer for Python, in a folder of the cache directory.

It is not part of the project's environment, because only ``make fuzz`` needs it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from testing.child_process import REPOSITORY
from tools.cache import cache_root, cached_directory, exclusive, uv

REQUIREMENTS = REPOSITORY / "tools" / "requirements" / "fuzz.txt"


class InstallationError(RuntimeError):
    """Atheris cannot be installed. The message says what to do."""


def package() -> Path:
    """Return the folder with the packages. Installs them if they are missing (35 MB, a few seconds).

    The name of the folder depends on the pins and on the version of Python. Raises InstallationError.
    """
    tag = f"{sys.implementation.cache_tag}\n{REQUIREMENTS.read_text()}"
    name = f"atheris-{hashlib.sha256(tag.encode()).hexdigest()[:8]}"
    with exclusive(cache_root() / f"{name}.lock", _say):
        return cached_directory(name, _install)


def variables() -> dict[str, str]:
    """Return the environment variables of a process that fuzzes."""
    paths = (REPOSITORY, REPOSITORY / "operator", REPOSITORY / "sidecar", package())
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_")},
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONHASHSEED": "0",  # so that a crash repeats
    }


def corpus(name: str) -> Path:
    """Return the folder in which a target's interesting inputs are stored between runs."""
    folder = cache_root() / "fuzz-corpus" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _install(folder: Path) -> None:
    _say("installing Atheris (35 MB)")
    command = [uv(), "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--python", sys.executable, "--target", folder, "--requirement", REQUIREMENTS]
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise InstallationError(
            "Atheris cannot be installed. It has packages for Linux and Python 3.11 to 3.13. Check the access"
            f" to the package index.\n{done.stdout[-4000:]}"
        )


def _say(text: str) -> None:
    print(f"[fuzz] {text}", file=sys.stderr, flush=True)
