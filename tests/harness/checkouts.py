"""Copies of this checkout with other permissions and times, for tests of reproducible builds."""

import os
import shutil
from pathlib import Path

from tools.images.build import ROOT, tracked

IMAGE_SOURCES = ["pyproject.toml", "README.md", "LICENSE", "operator", "sidecar"]
"""Files from which the wheel is built."""


def copy(folder: Path, umask: int, seconds: int, names: list[str]) -> Path:
    """Copy tracked files under ``names``, as a checkout with this umask at this time has them."""
    for path in tracked(names):
        target = folder / path.relative_to(ROOT)
        for parent in reversed(target.parents):
            if not parent.exists():
                parent.mkdir()
                parent.chmod(0o777 & ~umask)
        shutil.copyfile(path, target)
        target.chmod((0o777 if os.access(path, os.X_OK) else 0o666) & ~umask)
        os.utime(target, (seconds, seconds))
    return folder
