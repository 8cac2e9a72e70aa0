"""Create the payload: a folder from which any engine's Python can import the client.

The sidecar's image gives this folder to engines.

    python -m tools.payload OUT [--part client] [--python 3.12 ...] [--platform x86_64-manylinux_2_28]

    OUT/lmcache_client/          the connectors of engines; the engine's PYTHONPATH contains OUT
    OUT/lmcache_store/           the storage core
    OUT/lmcache_bundled/cp312/   gRPC and Protobuf for that Python; `lmcache_client` appends it to sys.path,
    so that
                                 the engine's own packages take precedence

Limits: Linux with glibc, and the given Pythons and platform. numpy and torch come from the engine.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "sidecar" / "requirements.txt"
PARTS = ("client", "bundle")
PACKAGES = ("sidecar/lmcache_client", "sidecar/lmcache_store")
"""Our packages in the payload, as folders of the checkout.

None is named ``lmcache``, so that an engine can also import LMCache's own package of this name.
"""
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
PLATFORM = f"{platform.machine()}-manylinux_2_28"
BUNDLED = ("grpcio", "protobuf", "typing-extensions")
"""Packages that the client imports and that an engine may lack, with their dependencies."""


def pins() -> list[str]:
    """Return `BUNDLED` with the sidecar's versions and hashes. Raises ValueError if a version is missing."""
    entries = re.split(r"\n(?=\S)", PINS.read_text().strip())
    pinned = {entry.partition("==")[0]: entry for entry in entries}
    if missing := set(BUNDLED) - set(pinned):
        raise ValueError(f"{PINS.name} has no pin for {', '.join(sorted(missing))}")
    return [pinned[name] for name in BUNDLED]


def copy_packages(out: Path, packages: Sequence[str] = PACKAGES) -> None:
    """Copy packages of the checkout. All users can read the copies, with any umask of the checkout."""
    unwanted = shutil.ignore_patterns("__pycache__", "*.proto", "*.pyi")
    for package in packages:
        copy = out / Path(package).name
        shutil.copytree(ROOT / package, copy, ignore=unwanted)
        for path in [copy, *copy.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)


def bundle(out: Path, python: str, target: str = PLATFORM) -> None:
    """Unpack the wheels for one Python. Raises CalledProcessError if no wheel supports it."""
    folder = out / "lmcache_bundled" / f"cp{python.replace('.', '')}"
    subprocess.run(
        [
            os.environ.get("UV", "uv"), "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:",
            f"--python-version={python}", f"--python-platform={target}", "--target", str(folder),
            "--require-hashes", "--requirements", "-",
        ],
        input="\n".join(pins()),
        text=True,
        check=True,
    )  # fmt: skip


def make(
    out: Path, parts: Sequence[str] = PARTS, pythons: Sequence[str] = PYTHONS, target: str = PLATFORM
) -> None:
    """Create parts of the payload in ``out``, which must not exist."""
    out.mkdir(parents=True)
    if "client" in parts:
        copy_packages(out)
    if "bundle" in parts:
        for python in pythons:
            bundle(out, python, target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, help="default: both")
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="X.Y", help="default: all four")
    parser.add_argument("--platform", default=PLATFORM, help="default: %(default)s")
    options = parser.parse_args()
    make(options.out, options.part, options.python, options.platform)


if __name__ == "__main__":
    main()
