"""Unpacked wheels for the Python of a GPU machine, from a package registry."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.cache import uv
from tools.gpu_bundle.lists import Requirement

PLATFORM = "x86_64-manylinux_2_31"
"""Systems with glibc 2.31: RHEL 9, Debian 11, Ubuntu 20.04. llguidance has no wheel for older systems."""


def install(packages: Sequence[Requirement], folder: Path, python: str) -> None:
    """Unpack wheels into a folder. Raises SystemExit with a remedy if one cannot be downloaded.

    Files may be links to those in uv's cache: replace files, and never write to them.

    Args:
        packages: The packages, without their dependencies.
        folder: The folder; its Python modules can be imported from there.
        python: Version of the machine's Python, for example 3.12.
    """
    argv = [
        str(uv()), "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes",
        f"--python={sys.executable}", f"--python-version={python}", f"--python-platform={PLATFORM}",
        "--target", str(folder), "--requirements", "-",
    ]  # fmt: skip
    text = "\n".join(package.text for package in packages)
    done = subprocess.run(argv, input=text, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        names = ", ".join(f"{package.name} {package.version}" for package in packages[:3])
        raise SystemExit(
            f"{done.stderr.strip()}\n"
            f"{len(packages)} packages ({names}, ...) cannot be installed for Python {python}, {PLATFORM}. "
            "Is the package registry reachable? Another Python: --python 3.12"
        )
    shutil.rmtree(folder / "bin", ignore_errors=True)  # their first line names this machine's Python
    (folder / ".lock").unlink(missing_ok=True)
