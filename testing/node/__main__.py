"""``python -m testing.node COMMAND...``: run a command where a node can run, with nothing of it left after.

Without a command it only says whether a node can run on this machine.

The command gets network, mount and process namespaces of its own, in which /run, /var/log, /var/lib and
/dev/shm can be written to and are thrown away. What containerd unpacked from images is kept on disk between
runs. However this ends, by SIGKILL too, a process outside takes away control groups and files.
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
from testing.node.inside import KEPT, THROWN_AWAY
from tools.cache import cache_root

UNSHARE = (
    "unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child",
    "--propagation", "private",
)  # fmt: skip
_END_SECONDS = 60


def main() -> int:
    if reason := requirements.what_is_missing():
        print(f"no node can run on this machine: {reason}", file=sys.stderr)
        return 1
    if not sys.argv[1:]:
        return 0
    disk, lock = _take_disk()
    group = f"lmcache-node-{hashlib.sha256(bytes(disk)).hexdigest()[:8]}"
    _clean_up(disk, group)  # of a run that the machine's own end cut off
    watcher, alive = _watch_over(disk, group, lock)
    groups.make(group)
    for name in (*KEPT, *THROWN_AWAY):
        (disk / name).mkdir(exist_ok=True)
    # To the whole foreground belongs a Ctrl-C: the command ends by it, and we by the command's end.
    signal.signal(signal.SIGINT, lambda *_: None)
    here = [sys.executable, "-m", "testing.node.inside", str(disk), group]
    done = subprocess.run(["setpriv", "--pdeathsig", "KILL", "--", *UNSHARE, *here, *sys.argv[1:]])
    os.close(alive)
    os.waitpid(watcher, 0)
    return done.returncode


def _take_disk() -> tuple[Path, IO[bytes]]:
    """The first directory for a node's disk that no other run has, and the file whose lock makes it ours."""
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
    """Fork a process that cleans up when we have ended, however: the pipe returned with its id closes then.

    It keeps the lock until it is done.
    """
    told, alive = os.pipe()
    if watcher := os.fork():
        os.close(told)
        lock.close()
        return watcher, alive
    os.setsid()
    os.close(alive)
    os.read(told, 1)
    _clean_up(disk, group)
    os._exit(0)


def _clean_up(disk: Path, group: str) -> None:
    deadline = time.monotonic() + _END_SECONDS
    while not groups.remove(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    for name in THROWN_AWAY:
        shutil.rmtree(disk / name, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
