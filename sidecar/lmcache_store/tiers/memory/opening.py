"""Open and lock the arena's file, adopt or replace it, and take memory for it.

The arena is the file in shared memory that holds the memory tier. Its first page is the **head**, which
records the file's format. Every slot has a **generation**, a number that increases whenever the slot is
reused.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from pathlib import Path

from lmcache_store.tiers.errors import ArenaError
from lmcache_store.tiers.memory.capacity import check_capacity
from lmcache_store.tiers.memory.kernel_pages import taken_bytes
from lmcache_store.tiers.memory.layout import HEAD_BYTES, Head

logger = logging.getLogger(__name__)


def open_arena(path: Path, capacity: int, needed_bytes: int) -> tuple[int, Head]:
    """Return a locked descriptor of a file of ``capacity`` bytes, and its head.

    A new file gets a fresh head. ``needed_bytes``: memory that the file will take. Raises ArenaError and
    OSError.
    """
    fd = _open_locked(path)
    try:
        size = os.fstat(fd).st_size
        head = _read_head(fd, size, capacity) if size else None
        # Check before the old file is removed. Its memory counts for its successor, too.
        check_capacity(path, needed_bytes, taken_bytes(fd))
        if size and (head is None or head.capacity_bytes != capacity or size != capacity):
            logger.warning("replacing the arena %s: it has another size or version, or is damaged", path)
            path.unlink()
            fresh = _open_locked(path)
            os.close(fd)
            fd, head = fresh, None
        os.ftruncate(fd, capacity)
        allocate(fd, 0, HEAD_BYTES)
        with contextlib.suppress(PermissionError):  # another user may own a file that an earlier sidecar left
            os.fchmod(fd, 0o660)  # regardless of the umask: an engine may run as another user of the group
    except BaseException:
        if os.fstat(fd).st_size == 0:  # this call created it
            path.unlink(missing_ok=True)
        os.close(fd)
        raise
    # An engine may still hold slots of an earlier file with this path. The time is larger than every
    # generation of that file, so the engine can't mistake a new slot for an old one.
    return fd, head or Head(capacity, epoch=0, first_generation=time.time_ns(), geometry=None)


def _read_head(fd: int, size: int, capacity: int) -> Head | None:
    try:
        return Head.parse(os.pread(fd, HEAD_BYTES, 0).ljust(HEAD_BYTES, b"\0"))
    except ArenaError:
        if size != capacity:
            raise
        return None  # a file of this exact length is an arena of which an engine overwrote the head


def _open_locked(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ArenaError(f"the arena {path} is in use by another sidecar: give each its own path") from None
    return fd


def allocate(fd: int, offset: int, length: int) -> None:
    """Take memory for a part of the file. Raises ArenaError when its volume has none left."""
    try:
        os.posix_fallocate(fd, offset, length)
    except OSError as error:
        raise ArenaError(f"can't take {length} bytes from the arena's volume: {error.strerror}") from error
