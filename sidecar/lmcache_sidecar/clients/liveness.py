"""Proof of death: a client is dead when the kernel has dropped its record lock, and then 2 s have passed.

A broken stream proves nothing: the engine may be frozen, or swapped out, with a copy half done. Only clients
in quarantine are looked at, so a healthy sidecar polls nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

GRACE_SECONDS = 2.0
"""Time from the lock's end to the reuse of slots: a dying process's last DMA may still be under way."""

POLL_SECONDS = 0.25


class LockProbe:
    """One client's lock file, held open by a descriptor, which is valid even after the path was removed."""

    def __init__(self, path: Path, *, is_resting: bool = False) -> None:
        """Raises OSError if the file can't be opened.

        A resting probe opens the file at each check, and keeps it open once the lock was held. Dead clients
        may have left more files than this process can have descriptors.
        """
        self._path = path
        self._fd = -1 if is_resting else _open(path)

    def is_held(self) -> bool:
        """Return whether the client holds its lock. Returns True if that is uncertain."""
        try:
            fd = self._fd if self._fd >= 0 else _open(self._path)
        except OSError as error:
            return not isinstance(error, FileNotFoundError)  # other errors prove nothing
        is_held = _is_held(fd)
        if is_held:
            self._fd = fd
        elif fd != self._fd:
            os.close(fd)
        return is_held

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)

    def remove(self) -> None:
        """Remove the file of a dead client, unless another file has taken its path."""
        with contextlib.suppress(OSError):  # a file that remains only takes an inode
            if self._fd < 0 or os.path.samestat(os.stat(self._path), os.fstat(self._fd)):
                self._path.unlink()
        self.close()


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)


def _is_held(fd: int) -> bool:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.lockf(fd, fcntl.LOCK_UN)
    return False


def probes_in(directory: Path) -> dict[bytes, LockProbe]:
    """Return probes of all lock files in a directory, by client UUID.

    Other files are ignored: a client without a readable lock file is never attached.
    """
    probes, num_ignored = {}, 0
    for path in directory.glob("*.lock"):
        if re.fullmatch(r"[0-9a-f]{32}", path.stem):
            if _is_lock_file(path):
                probes[bytes.fromhex(path.stem)] = LockProbe(path, is_resting=True)
            else:
                num_ignored += 1
    if num_ignored:
        logger.warning("Ignored %d entries of %s that are not lock files of clients", num_ignored, directory)
    return probes


def _is_lock_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode) and os.access(path, os.R_OK | os.W_OK)
    except FileNotFoundError:  # its client has just detached; the probe will notice
        return True


class LivenessMonitor:
    """Calls ``on_death(uuid)`` once for each watched client that is proven dead."""

    def __init__(self, on_death: Callable[[bytes], None], clock: Callable[[], float]) -> None:
        self._on_death = on_death
        self._clock = clock
        self._probes: dict[bytes, LockProbe] = {}
        self._unlocked_at: dict[bytes, float] = {}  # when a lock was first found free
        self._has_work = asyncio.Event()

    def watch(self, uuid: bytes, probe: LockProbe) -> None:
        """Start watching a client, and take over its probe."""
        self._probes[uuid] = probe
        self._has_work.set()

    def forget(self, uuid: bytes) -> None:
        """Stop watching a client that is attached again."""
        self._unlocked_at.pop(uuid, None)
        if (probe := self._probes.pop(uuid, None)) is not None:
            probe.close()

    def step(self) -> None:
        """Check every watched client once."""
        now = self._clock()
        for uuid, probe in list(self._probes.items()):
            if probe.is_held():
                self._unlocked_at.pop(uuid, None)
            elif now - self._unlocked_at.setdefault(uuid, now) >= GRACE_SECONDS:
                del self._probes[uuid], self._unlocked_at[uuid]
                probe.remove()
                self._on_death(uuid)

    async def run(self) -> None:
        """Call ``step`` every POLL_SECONDS while there are clients to watch."""
        while True:
            await self._has_work.wait()
            try:
                self.step()
            except Exception:  # if the monitor ended, all slots would stay in quarantine
                logger.exception("Looking for dead clients failed")
            if not self._probes:
                self._has_work.clear()
            await asyncio.sleep(POLL_SECONDS)
