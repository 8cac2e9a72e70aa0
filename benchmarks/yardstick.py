"""Reference copies in C, without overhead. The first use compiles them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.cache import cache_root

SOURCE = Path(__file__).with_suffix(".c")


@functools.cache
def library() -> ctypes.CDLL:
    """Return the compiled library. Raises FileNotFoundError if there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("the reference copies are C code, and there is no compiler: install gcc")
    built = cache_root() / f"yardstick-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        fresh = built.with_suffix(f".{os.getpid()}")
        flags = ["-O3", "-march=native", "-pthread", "-shared", "-fPIC"]
        subprocess.run([compiler, *flags, str(SOURCE), "-o", str(fresh)], check=True)
        fresh.rename(built)
    loaded = ctypes.CDLL(str(built))  # its calls release the GIL
    loaded.copy_pieces.restype = None
    return loaded


def copy(
    pairs: Sequence[tuple[int, int]], piece_bytes: int, threads: int = 1, *, streaming: bool = False
) -> Callable[[], None]:
    """A copy of pieces, given as (target, source) addresses; call it to run it."""
    targets, sources = ((ctypes.c_void_p * len(pairs))(*side) for side in zip(*pairs, strict=True))
    number, size = ctypes.c_size_t(len(pairs)), ctypes.c_size_t(piece_bytes)

    def run() -> None:
        library().copy_pieces(targets, sources, number, size, threads, int(streaming))

    return run
