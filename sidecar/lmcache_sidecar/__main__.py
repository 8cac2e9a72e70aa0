"""The program: the command line, and with LMCACHE_STAY_UP a parent process that restarts the sidecar.

When a sidecar's container ends, the kubelet takes the pod, and so a healthy engine, out of service until the
container runs again. It delays repeated restarts by up to five minutes. In the image, the container therefore
outlives the sidecar: the parent restarts the sidecar, and answers the kubelet's probes meanwhile. Without
those answers, the kubelet would restart the container.

This module imports only small modules of the standard library, so that the parent cannot fail.
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
"""Exit status of a sidecar whose configuration says not to stay up; see `lmcache_sidecar.command`."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 30.0
_GOOD_SECONDS = 60.0
"""Length of a run after which the pauses start again with the first one."""
_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
_PORT, _PORT_FLAG, _DEFAULT_PORT = "LMCACHE_HTTP_PORT", "--http-port", "9464"
_ANSWER_SECONDS = 0.1
"""Interval between checks for probes, and deadline of one probe: kubelets wait for one second."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    words = sys.argv[1:] if arguments is None else [*arguments]
    if os.environ.get("LMCACHE_STAY_UP") == "true" and words[:1] == ["serve"]:
        return _supervise(words)
    from lmcache_sidecar import command

    status = command.main(words)
    if words[:1] == ["serve"]:
        command.leave(status)
    return status


def _supervise(arguments: list[str]) -> int:
    """Run the sidecar, and restart it after crashes, until a signal ends it or it exits by itself."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    argv, pause = [sys.executable, "-m", _COMMAND, *arguments], _FIRST_PAUSE_SECONDS
    while True:
        began = time.monotonic()
        is_stopped, status = _run(argv)
        if is_stopped and -status in _SIGNALS:  # it arrived before the sidecar handled signals
            return 0
        if is_stopped or status in (0, _CAN_NOT_RUN):
            return status if status >= 0 else 128 - status
        if time.monotonic() - began > _GOOD_SECONDS:
            pause = _FIRST_PAUSE_SECONDS
        how = f"by signal {-status}" if status < 0 else f"with exit status {status}"
        message = f"the sidecar ended {how}: restarting it in {pause:g} s"
        _log(message)
        with _listening(_port(arguments)) as listener:
            if _is_stopped_within(pause, listener, message):
                return 0
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _log(message: object) -> None:
    print(f"lmcache-sidecar: {message}", file=sys.stderr, flush=True)


def _run(argv: list[str]) -> tuple[bool, int]:
    """Run the sidecar once. Returns whether a signal asked to stop, and the exit status."""
    try:
        child = os.posix_spawn(sys.executable, argv, os.environ, setsigmask=())
    except OSError as error:  # memory or process numbers are used up at the moment
        _log(error)
        return False, 1
    return _wait(child)


def _wait(child: int) -> tuple[bool, int]:
    """Wait for the child, and forward signals to it. Returns as ``_run`` does."""
    is_stopped = False
    while True:
        number = signal.sigwait(_SIGNALS)
        if number != signal.SIGCHLD:
            is_stopped = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)
        for ended, status in _ended():
            if ended == child:
                return is_stopped, os.waitstatus_to_exitcode(status)


def _ended() -> list[tuple[int, int]]:
    """Reap all ended children: the first process of a container inherits orphans, too."""
    reaped: list[tuple[int, int]] = []
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            reaped.append(ended)
    return reaped


def _is_stopped_within(seconds: float, listener: socket.socket | None, reason: str) -> bool:
    """Wait for a signal to stop, and answer probes with the reason. Returns whether a signal arrived."""
    deadline, has_answered = time.monotonic() + seconds, False
    while (left := deadline - time.monotonic()) > 0:
        received = signal.sigtimedwait(_SIGNALS, 0 if has_answered else min(left, _ANSWER_SECONDS))
        if received is not None and received.si_signo != signal.SIGCHLD:
            return True
        _ended()
        has_answered = False
        with contextlib.suppress(OSError):  # no client is waiting, or it is too slow
            if listener is not None:
                connection, has_answered = listener.accept()[0], True
                _answer(connection, reason)
    return False


def _port(arguments: list[str]) -> str:
    """Return the sidecar's HTTP port from flag or environment. A port in a --config file is not read."""
    ports = [os.environ.get(_PORT, _DEFAULT_PORT)]
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if flag == _PORT_FLAG:
            ports.append(value if equals else following)
    return ports[-1]


@contextlib.contextmanager
def _listening(port: str) -> Iterator[socket.socket | None]:
    """Open a listening socket that does not block; None if the port can't be used."""
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


def _answer(connection: socket.socket, reason: str) -> None:
    """Answer one probe as a sidecar that is alive but not ready."""
    with connection, contextlib.suppress(OSError):
        connection.settimeout(_ANSWER_SECONDS)
        path = connection.recv(4096).partition(b" ")[2].partition(b" ")[0]
        stats = {"is_ready": False, "not_ready_reason": reason}
        pages = {b"/healthz": (200, "ok"), b"/stats": (200, json.dumps(stats))}
        status, body = pages.get(path, (503, reason))
        head = f"HTTP/1.1 {status} -\r\nContent-Length: {len(body) + 1}\r\nConnection: close\r\n\r\n"
        connection.sendall(f"{head}{body}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
