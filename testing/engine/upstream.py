"""LMCache's own package, to test that engines can import it and this project's client together.

    python -m testing.engine.upstream    # download it (90 MB, once)

Only the package itself is installed, because its modules that the tests import need no further package.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tools.cache import cached_directory, uv

VERSION = "0.5.6"


def package() -> Path:
    """Return the directory that contains upstream's ``lmcache``. Downloads it if it is missing."""
    return cached_directory(f"upstream-lmcache-{VERSION}", _install)


def _install(folder: Path) -> None:
    install = [str(uv()), "pip", "install", "--quiet", "--no-deps", "--no-cache", "--python", sys.executable]
    subprocess.run([*install, "--target", str(folder), f"lmcache=={VERSION}"], check=True)


if __name__ == "__main__":
    package()
