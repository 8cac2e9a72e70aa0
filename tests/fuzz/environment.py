"""Atheris, the coverage-guided fuzzer for Python, in a folder of the cache directory.

It is not part of the project's environment, because only ``make fuzz`` needs it.
"""

import os
import sys
from pathlib import Path

from testing.child_process import REPOSITORY, SOURCES
from testing.packages import installed
from tools.cache import cache_root

REQUIREMENTS = REPOSITORY / "tools" / "requirements" / "fuzz.txt"


def package() -> Path:
    """Return the folder with the packages. Installs them if they are missing (35 MB, a few seconds).

    Raises InstallationError.
    """
    problem = (
        "Atheris cannot be installed. It has packages for Linux and Python 3.11 to 3.13. Check the access to"
        " the package index."
    )
    return installed("atheris", REQUIREMENTS, "Atheris (35 MB)", problem, _say)


def variables() -> dict[str, str]:
    """Return the environment variables of a process that fuzzes."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_")},
        "PYTHONPATH": f"{SOURCES}{os.pathsep}{package()}",
        "PYTHONHASHSEED": "0",  # so that a crash repeats
    }


def corpus(name: str) -> Path:
    """Return the folder in which a target's interesting inputs are stored between runs."""
    folder = cache_root() / "fuzz-corpus" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _say(text: str) -> None:
    print(f"[fuzz] {text}", file=sys.stderr, flush=True)
