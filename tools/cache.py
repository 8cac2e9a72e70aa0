"""Cache directory for results that take minutes to create. Runs and checkouts share it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


def cache_root() -> Path:
    """Return the directory that setup.sh uses, too: ``$LMCACHE_CACHE_DIR``, or one in the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmcache-cluster"
    return Path(os.environ.get("LMCACHE_CACHE_DIR") or default)


def uv() -> Path:
    """Return the package installer: the project's, the machine's, or the one that set-up downloaded.

    Raises FileNotFoundError, with a remedy.
    """
    in_environment = Path(sys.executable).parent / "uv"
    candidates = [
        in_environment,
        *map(Path, filter(None, [shutil.which("uv")])),
        *cache_root().glob("uv-*/bin/uv"),
    ]
    for candidate in candidates:
        if candidate.exists():
            return candidate
    raise FileNotFoundError("uv is not installed: run `make setup`")


def cached_directory(name: str, make: Callable[[Path], None]) -> Path:
    """Return the directory of this name in the cache directory. If it is missing, ``make`` fills it.

    The directory appears complete or not at all, even if several processes create it at the same time.
    """
    target = cache_root() / name
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            folder = Path(scratch) / "made"
            folder.mkdir()
            make(folder)
            try:
                folder.rename(target)
            except OSError:  # another process was faster
                shutil.rmtree(folder)
    return target


@contextlib.contextmanager
def exclusive(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock file. Calls ``say`` before it waits for another process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that builds the same ({path})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
