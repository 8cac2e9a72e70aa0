"""``python -m testing.node COMMAND...``: run a command where a node can run, and clean up afterwards.

Without a command it only checks whether a node can run on this machine.

The command gets its own network, mount and process namespaces. In them, /run, /var/log, /var/lib and /dev/shm
are writable and temporary. Only the images that containerd has unpacked are cached on disk between runs. A
process outside removes control groups and files after any end, including SIGKILL.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from testing.node import groups, requirements
from testing.node.inside import CACHED, TEMPORARY
from tools.cache import cache_root

UNSHARE = (
    "unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child",
    "--propagation", "private",
)  # fmt: skip
_END_SECONDS = 60


def main() -> int:
    if reason := requirements.missing_requirement():
        print(f"no node can run on this machine: {reason}", file=sys.stderr)
        return 1
    if not sys.argv[1:]:
        return 0
    disk, lock = _take_disk()
    group = f"lmcache-node-{hashlib.sha256(bytes(disk)).hexdigest()[:8]}"
    _clean_up(disk, group)  # after a run that ended with the machine
    watcher, write_end = _watch_over(disk, group, lock)
    groups.make(group)
    for name in (*CACHED, *TEMPORARY):
        (disk / name).mkdir(exist_ok=True)
    # Ctrl-C goes to the whole foreground group. It ends the command, and this process ends with the command.
    signal.signal(signal.SIGINT, lambda *_: None)
    inside_command = [sys.executable, "-m", "testing.node.inside", str(disk), group]
    completed = subprocess.run(
        ["setpriv", "--pdeathsig", "KILL", "--", *UNSHARE, *inside_command, *sys.argv[1:]]
    )
    os.close(write_end)
    os.waitpid(watcher, 0)
    return completed.returncode


def _take_disk() -> tuple[Path, IO[bytes]]:
    """The first directory for a node's disk that no other run uses, and the file whose lock reserves it."""
    for number in itertools.count():
        disk = cache_root() / "node" / str(number)
        disk.mkdir(parents=True, exist_ok=True)
        lock = (disk / "lock").open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        return disk, lock
    raise AssertionError("unreachable")


def _watch_over(disk: Path, group: str, lock: IO[bytes]) -> tuple[int, int]:
    """Fork a process that cleans up after this process has ended. It notices the end by the closed pipe,
    whose write end is returned with its id.

    It holds the lock until it has finished.
    """
    read_end, write_end = os.pipe()
    if watcher := os.fork():
        os.close(read_end)
        lock.close()
        return watcher, write_end
    os.setsid()
    os.close(write_end)
    os.read(read_end, 1)
    _clean_up(disk, group)
    os._exit(0)


def _clean_up(disk: Path, group: str) -> None:
    deadline = time.monotonic() + _END_SECONDS
    while not groups.remove(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    for name in TEMPORARY:
        shutil.rmtree(disk / name, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
