"""The proof that a client lives: a POSIX record lock on a file beside the socket.

The kernel drops such a lock when its process ends, however it ends, and never before; a forked child does not
inherit it. Any descriptor of the file that this process closes would drop it too, so it is opened here only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


class LockFile:
    """Held from ``acquire`` to ``release`` or the end of the process. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def acquire(self) -> None:
        """Make the file and lock it; nothing happens if that is still so. Raises OSError."""
        if self._is_in_place():
            return
        self._close()
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
        except FileNotFoundError as error:
            raise OSError(f"{self._path.parent} is missing: the sidecar makes it when it starts") from error
        with contextlib.suppress(PermissionError):  # made by another user, who has granted us what we need
            os.fchmod(self._fd, 0o660)  # whatever the umask: the sidecar may run as another user of the group
        fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        """Remove the file, then unlock it: whoever finds it unlocked in place knows that its client died."""
        if self._is_in_place():
            self._path.unlink(missing_ok=True)
        self._close()

    def _is_in_place(self) -> bool:
        """False when there is none, or somebody removed or replaced it."""
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
