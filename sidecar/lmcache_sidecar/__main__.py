"""The program: the command line, and above it, where it is to stay up, a parent that starts it again.

A kubelet takes a pod out of service, and so a healthy engine, from the end of its sidecar's container until
that runs again, which it delays by up to five minutes when it happens often. So in an image the container
does not end with the sidecar. Nothing is imported here that could fail or weigh.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence

_COMMAND = "lmcache_sidecar.command"
_CAN_NOT_RUN = 2
"""Exit status where it is told not to stay up after all; see `lmcache_sidecar.command`."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 30.0
_GOOD_SECONDS = 60.0
"""After a run of so long the next pause is the first again."""
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    given = sys.argv[1:] if arguments is None else [*arguments]
    if os.environ.get("LMCACHE_STAY_UP") == "true" and given[:1] == ["serve"]:
        return _run_again_and_again(given)
    from lmcache_sidecar.command import main as run

    return run(given)


def _run_again_and_again(arguments: list[str]) -> int:
    """Until it is told to end, or ends of its own accord."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    argv, pause = [sys.executable, "-m", _COMMAND, *arguments], _FIRST_PAUSE_SECONDS
    while True:
        began = time.monotonic()
        child = os.posix_spawn(sys.executable, argv, os.environ, setsigmask=())
        is_told, status = _wait(child)
        if is_told or status in (0, _CAN_NOT_RUN):
            return status if status >= 0 else 128 - status
        if time.monotonic() - began > _GOOD_SECONDS:
            pause = _FIRST_PAUSE_SECONDS
        how = f"by signal {-status}" if status < 0 else f"with exit status {status}"
        print(f"lmcache-sidecar: ended {how}: starting it again in {pause:g} s", file=sys.stderr, flush=True)
        if _is_told_within(pause):
            return 0
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _wait(child: int) -> tuple[bool, int]:
    """Whether we were told to end, and how it ended; what we are told it is told, too."""
    is_told = False
    while True:
        number = signal.sigwait(_SIGNALS)
        if number != signal.SIGCHLD:
            is_told = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)
        for ended, status in _ended():
            if ended == child:
                return is_told, os.waitstatus_to_exitcode(status)


def _ended() -> list[tuple[int, int]]:
    """Children that ended; the first process of a container inherits those of others, too."""
    found: list[tuple[int, int]] = []
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(ended)
    return found


def _is_told_within(seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        told = signal.sigtimedwait(_SIGNALS, left)
        if told is not None and told.si_signo != signal.SIGCHLD:
            return True
        _ended()
    return False


if __name__ == "__main__":
    sys.exit(main())
