"""Pinned packages that are no part of the project's environment, in folders of the cache directory."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tools.cache import cache_root, cached_directory, exclusive, uv


class InstallationError(RuntimeError):
    """Packages cannot be installed or compiled. The message says what to do."""


def installed(
    name: str, requirements: Path, announcement: str, problem: str, say: Callable[[str], None]
) -> Path:
    """Return the folder with the packages of a file of requirements. Installs them if they are missing.

    Raises InstallationError.

    Args:
        name: begin of the folder's name. The rest depends on the pins and on the version of Python.
        requirements: all packages, with hashes. Nothing else is installed.
        announcement: what is installed, its size and how long that takes.
        problem: begin of the error's message, with a remedy.
        say: reports progress.
    """
    tag = f"{sys.implementation.cache_tag}\n{requirements.read_text()}"
    name = f"{name}-{hashlib.sha256(tag.encode()).hexdigest()[:8]}"

    def install(folder: Path) -> None:
        say(f"installing {announcement}")
        # Compile bytecode here: processes that may not write bytecode would compile each time.
        command = [uv(), "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--compile-bytecode"]
        command += ["--python", sys.executable, "--target", folder, "--requirement", requirements]
        run([*map(str, command)], problem)

    with exclusive(cache_root() / f"{name}.lock", say):
        return cached_directory(name, install)


def run(command: Sequence[str], problem: str, env: Mapping[str, str] | None = None) -> None:
    """Run a command. Raises InstallationError with ``problem`` and the end of the output if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    if done.returncode:
        raise InstallationError(f"{problem}\n{done.stdout[-4000:]}")
