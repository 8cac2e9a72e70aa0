"""Find the Python sources of the repository."""

from __future__ import annotations

import subprocess
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("lmcache", "operator", "sidecar")
NOT_REWORDED = ("testing/blend/prompts.py",)
"""Files whose names and docstrings still have clipped words. Remove an entry once its words are rewritten.

The trained model in the repository holds a digest of prompts.py.
"""


def python_files(folders: Collection[str] = ()) -> list[Path]:
    """All Python files that Git tracks or would track, except generated ones.

    ``folders``: top folders to search; empty: all.
    """
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    names = [name for name in listed.stdout.split() if "_pb2" not in name]
    wanted = [name for name in names if not folders or name.split("/")[0] in folders]
    return [ROOT / name for name in wanted if (ROOT / name).exists()]


def reworded_files() -> list[Path]:
    """All Python files except those in ``NOT_REWORDED``."""
    left_out = tuple(ROOT / name for name in NOT_REWORDED)
    return [path for path in python_files() if not any(path.is_relative_to(other) for other in left_out)]
