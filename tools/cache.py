"""Where things that take minutes to make are kept between runs and checkouts."""

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
    """``$LMCACHE_CACHE_DIR``, or ``lmcache-cluster`` in the user's cache directory, as in setup.sh."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmcache-cluster"
    return Path(os.environ.get("LMCACHE_CACHE_DIR") or default)


def uv() -> Path:
    """The package installer: the project's own, the machine's, or the one that set-up fetched. Raises
    FileNotFoundError with what to do.
    """
    own = Path(sys.executable).parent / "uv"
    candidates = [own, *map(Path, filter(None, [shutil.which("uv")])), *cache_root().glob("uv-*/bin/uv")]
    for candidate in candidates:
        if candidate.exists():
            return candidate
    raise FileNotFoundError("uv is not installed: run `make setup`")


def kept(name: str, make: Callable[[Path], None]) -> Path:
    """Return the directory of this name in the cache directory; ``make`` fills it when it is not there.

    It appears whole or not at all, also when several processes make it at once.
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
    """Holds a lock file; says so when it has to wait for another process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is building the same; waiting for it ({path})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
