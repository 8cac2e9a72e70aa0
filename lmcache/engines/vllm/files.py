"""Name the content of weights' files by what the engine has loaded from them, not by where they lie.

A file counts only if it can't have changed since the engine could load it: its bytes are named by their hash
(Hugging Face's cache), or nothing about it changed since this process began. ``ctime`` says that: unlike
``mtime`` no tool can set it.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from lmcache.engines.errors import UnnamedError

T = TypeVar("T")

_SLICE_BYTES = 1 << 20
"""Hashed at once: under 0.2 ms, should a build of xxhash hold the GIL."""


def fingerprint(folder: Path, began: float) -> str:
    """Fingerprint the safetensors files of a folder, from whatever was loaded since ``began`` (Unix time).

    Reads all bytes of files whose hash is not known: call it on a thread of its own. Raises UnnamedError.
    """
    try:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise UnnamedError(f"there are no safetensors files in {folder}")
        digest = hashlib.sha256()
        for file in files:
            name, content = file.name.encode(), _blob_hash(file) or _content_hash(file, began)
            digest.update(struct.pack("<QQ", len(name), len(content)) + name + content)
    except OSError as error:
        raise UnnamedError(f"a file can't be read: {error}") from error
    return digest.hexdigest()


def check_unchanged(path: Path, began: float) -> None:
    """Raise UnnamedError when a file, its folder or a link on the way to it changed since ``began``.

    Raises OSError when there is none.
    """
    links = [link.st_ctime for link in _links(path)]
    if max(*links, path.stat().st_ctime, path.parent.stat().st_ctime) >= began:
        raise UnnamedError(f"{path} changed after the engine's start; restart the engine to share its KV")


def in_background(function: Callable[..., T], *arguments: Any) -> futures.Future[T]:
    """Run it on a thread that yields to all others and does not keep the process from ending."""
    result: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
            result.set_result(function(*arguments))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="lmcache-hash", daemon=True).start()
    return result


def process_began() -> float:
    """When this process began, as Unix time."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    uptime = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - uptime + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _links(path: Path) -> Iterator[os.stat_result]:
    """Every symbolic link on the way to ``path``, also in links' targets; the last is ``path`` itself."""
    left, here = list(reversed(Path(os.path.abspath(path)).parts)), Path("/")
    while left:
        part = left.pop()
        here = here.parent if part == ".." else here / part
        status = here.lstat()
        if stat.S_ISLNK(status.st_mode):
            yield status
            target = Path(os.readlink(here))
            left.extend(reversed(target.parts))
            here = here.parent
    yield status


def _blob_hash(file: Path) -> bytes | None:
    """Files of a Hugging Face cache are links to blobs that are named by the hash of all their bytes."""
    if not file.is_symlink():
        return None
    blob = Path(os.readlink(file))
    is_hash = re.fullmatch(r"[0-9a-f]{64}", blob.name) and blob.parent.name == "blobs"
    return bytes.fromhex(blob.name) if is_hash else None


def _content_hash(file: Path, began: float) -> bytes:
    digest, buffer = xxhash.xxh3_128(), bytearray(_SLICE_BYTES)
    with file.open("rb", buffering=0) as stream:
        while num_bytes := stream.readinto(buffer):
            digest.update(memoryview(buffer)[:num_bytes])
    check_unchanged(file, began)  # afterwards: it must hold for all that was read
    return digest.digest()
