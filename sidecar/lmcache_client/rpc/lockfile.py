"""Proves that a client is alive: a POSIX record lock on a file next to the socket.

The kernel releases such a lock when its process ends, for whatever reason, and never before. A forked child
does not inherit the lock. Closing any descriptor of the file would release it too, so only this module opens
the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


class LockFile:
    """A lock held from ``acquire`` to ``release``, or to the end of the process. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def acquire(self) -> None:
        """Create the file and lock it, unless this lock already holds it. Raises OSError."""
        if self._is_in_place():
            return
        self._close()
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
        except FileNotFoundError as error:
            raise OSError(f"{self._path.parent} is missing: the sidecar creates it at its start") from error
        with contextlib.suppress(PermissionError):  # another user created the file, and granted access to it
            os.fchmod(self._fd, 0o660)  # despite the umask: the sidecar may run as another user of the group
        fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        """Remove the file, then unlock it. A file that exists without a lock proves that its client died."""
        if self._is_in_place():
            self._path.unlink(missing_ok=True)
        self._close()

    def _is_in_place(self) -> bool:
        """Return True if the locked file still exists at its path, and was not replaced."""
        if self._fd < 0:
            return False
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except OSError:
            return False

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
