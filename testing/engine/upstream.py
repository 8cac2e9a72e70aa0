"""LMCache's own package, to test that engines can import it and this project's client together.

    python -m testing.engine.upstream    # download it (90 MB, once)

Only the package itself is installed, because its modules that the tests import need no further package.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from testing.engine.versions import install
from tools.cache import cached_directory

VERSION = "0.5.6"


def package() -> Path:
    """Return the directory that contains upstream's ``lmcache``. Downloads it if it is missing."""
    return cached_directory(f"upstream-lmcache-{VERSION}", partial(install, f"lmcache=={VERSION}"))


if __name__ == "__main__":
    package()
