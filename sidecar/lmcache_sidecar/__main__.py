"""The program: the command line, and above it, where it is to stay up, a parent that starts it again.

A kubelet takes a pod out of service, and so a healthy engine, from the end of its sidecar's container until
that runs again, which it delays by up to five minutes when it happens often. So in an image the container
does not end with the sidecar. While there is none, its parent answers the kubelet's probe in its stead: one
that dies before it listens would have the container ended after all. Nothing is imported here that could fail
or weigh.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence

_COMMAND = "lmcache_sidecar.command"
_CAN_NOT_RUN = 2
"""Exit status where it is told not to stay up after all; see `lmcache_sidecar.command`."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 30.0
_GOOD_SECONDS = 60.0
"""After a run of so long the next pause is the first again."""
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
_PORT, _PORT_FLAG, _DEFAULT_PORT = "LMCACHE_HTTP_PORT", "--http-port", "9464"
_ANSWER_SECONDS = 0.1
"""Between looks for who asks, and for one who is slow to ask: kubelets wait for a second."""


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
        is_told, status = _run(argv)
        if is_told or status in (0, _CAN_NOT_RUN):
            return status if status >= 0 else 128 - status
        if time.monotonic() - began > _GOOD_SECONDS:
            pause = _FIRST_PAUSE_SECONDS
        how = f"by signal {-status}" if status < 0 else f"with exit status {status}"
        what = f"ended {how}: starting it again in {pause:g} s"
        _say(what)
        with _listening(_port(arguments)) as listener:
            if _is_told_within(pause, listener, f"the sidecar {what}"):
                return 0
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _say(what: object) -> None:
    print(f"lmcache-sidecar: {what}", file=sys.stderr, flush=True)


def _run(argv: list[str]) -> tuple[bool, int]:
    """Whether we were told to end, and how it ended."""
    try:
        child = os.posix_spawn(sys.executable, argv, os.environ, setsigmask=())
    except OSError as error:  # no memory, or no process, to be had just now
        _say(error)
        return False, 1
    return _wait(child)


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


def _is_told_within(seconds: float, listener: socket.socket | None, why: str) -> bool:
    """Whether we are told to end; until then whoever asks is told why there is no sidecar."""
    deadline, is_asked = time.monotonic() + seconds, False
    while (left := deadline - time.monotonic()) > 0:
        told = signal.sigtimedwait(_SIGNALS, 0 if is_asked else min(left, _ANSWER_SECONDS))
        if told is not None and told.si_signo != signal.SIGCHLD:
            return True
        _ended()
        is_asked = False
        with contextlib.suppress(OSError):  # nobody asks, or who does is slow
            if listener is not None:
                connection, is_asked = listener.accept()[0], True
                _answer(connection, why)
    return False


def _port(arguments: list[str]) -> str:
    """Where the sidecar would listen; one that only a file names is not known here."""
    given = [os.environ.get(_PORT, _DEFAULT_PORT)]
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if flag == _PORT_FLAG:
            given.append(value if equals else following)
    return given[-1]


@contextlib.contextmanager
def _listening(port: str) -> Iterator[socket.socket | None]:
    """A socket that waits for nobody; None where there is none to be had."""
    is_any = socket.has_dualstack_ipv6()  # a pod may have addresses of one family only
    family = socket.AF_INET6 if is_any else socket.AF_INET
    try:
        listener = socket.create_server(("", int(port)), family=family, dualstack_ipv6=is_any)
    except (OSError, OverflowError, ValueError):
        yield None
        return
    with listener:
        listener.setblocking(False)
        yield listener


def _answer(connection: socket.socket, why: str) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(_ANSWER_SECONDS)
        path = connection.recv(4096).partition(b" ")[2].partition(b" ")[0]
        stats = {"is_ready": False, "not_ready_reason": why}
        pages = {b"/healthz": (200, "ok"), b"/stats": (200, json.dumps(stats))}
        status, body = pages.get(path, (503, why))
        head = f"HTTP/1.1 {status} -\r\nContent-Length: {len(body) + 1}\r\nConnection: close\r\n\r\n"
        connection.sendall(f"{head}{body}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
