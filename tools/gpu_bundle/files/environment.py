"""Create a Python environment with the bundle's packages on top of those of this machine's Python.

    python3 .gpu/environment.py FOLDER

Packages of the bundle come first, then this checkout, then everything that this Python can import now. Tests
start children that replace PYTHONPATH and keep ``sys.executable``, so PYTHONPATH alone would not do.

A second run reuses the folder if bundle, checkout and Python are the same. Needs Python 3.10 and no package.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import site
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

BUNDLE = Path(__file__).resolve().parent
ROOT = BUNDLE.parent
ARCHIVES = ("packages.tar.xz", "engine.tar.xz")


def main() -> int:
    folder = Path(sys.argv[1]).absolute()
    if problem := _unusable(folder):
        print(problem, file=sys.stderr)
        return 1
    identity = _identity()
    stamp = folder / "identity"
    if not stamp.exists() or stamp.read_text() != identity:
        shutil.rmtree(folder, ignore_errors=True)
        create(folder)
        stamp.write_text(identity)
    if absent := [name for name in (BUNDLE / "expected").read_text().split() if not _has(name)]:
        print(
            f"This machine lacks packages that the bundle does not contain: {' '.join(absent)}. Checks that "
            "need them fail. Run here: python3 -m pip freeze > machine.txt. Then pack again where there is "
            "a network: make gpu-bundle MACHINE=machine.txt"
        )
    print(f"environment {folder}: Python {sys.version.split()[0]}")
    return 0


def create(folder: Path) -> None:
    """Create the environment."""
    venv.EnvBuilder(symlinks=True).create(folder)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = folder / "lib" / version / "site-packages"
    for name in ARCHIVES:
        if (BUNDLE / name).exists():
            _extract(BUNDLE / name, packages)
    project = [str(ROOT), str(ROOT / "operator"), str(ROOT / "sidecar")]
    lines = project + [f"import site; site.addsitedir({path!r})" for path in machine_folders()]
    (packages / "gpu_bundle.pth").write_text("\n".join(lines) + "\n")
    if (BUNDLE / "redis.tar.xz").exists():
        _add_redis(folder)


def machine_folders() -> list[str]:
    """Return the folders from which this Python imports packages. Its standard library is not among them."""
    # The first entry is this script's folder.
    candidates = [*sys.path[1:], *site.getsitepackages()]
    standard = {os.path.dirname(os.__file__)}
    folders = [path for path in dict.fromkeys(candidates) if os.path.isdir(path) and path not in standard]
    return [path for path in folders if not path.endswith("lib-dynload")]


def _has(name: str) -> bool:
    """Whether this Python has a distribution."""
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _add_redis(folder: Path) -> None:
    """Put the bundle's ``redis-server`` on the PATH of the environment if this machine has none."""
    if shutil.which("redis-server"):
        return
    _extract(BUNDLE / "redis.tar.xz", folder / "redis")
    launcher = folder / "redis" / "redis-server"
    done = subprocess.run([str(launcher), "--version"], capture_output=True, text=True)
    if done.returncode:
        print(f"redis-server of the bundle does not run here: {done.stderr.strip()}", file=sys.stderr)
        return
    (folder / "bin" / "redis-server").symlink_to(launcher)


def _extract(archive: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as file:
        file.extractall(folder)


def _unusable(folder: Path) -> str:
    """Return the reason why no environment can be created, with the remedy; empty if there is none."""
    wanted = (BUNDLE / "python").read_text().strip()
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if version != wanted:
        return (
            f"{sys.executable} is Python {version}, but the bundle is for {wanted}. "
            f"Set PYTHON=python{wanted}, or pack again: make gpu-bundle TARGET_PYTHON={version}"
        )
    if folder.exists() and folder.stat().st_uid != os.getuid():
        return f"{folder} belongs to another user: set GPU_ENVIRONMENT to another folder"
    return ""


def _identity() -> str:
    """Return a text that changes with the bundle, the checkout and this Python."""
    digest = hashlib.sha256()
    for name in (*ARCHIVES, "redis.tar.xz"):
        if (BUNDLE / name).exists():
            digest.update((BUNDLE / name).read_bytes())
    return "\n".join([digest.hexdigest(), str(ROOT), sys.executable, sys.version, *machine_folders()])


if __name__ == "__main__":
    sys.exit(main())
