"""Namespaces of Linux, which separate the nodes of ``two_nodes``, and processes like containers."""

import ctypes
import os
import signal
from pathlib import Path

MOUNT, NETWORK, _PIDS = 0x00020000, 0x40000000, 0x20000000  # CLONE_NEWNS, CLONE_NEWNET, CLONE_NEWPID
_RECURSIVE, _PRIVATE = 0x4000, 0x40000  # MS_REC, MS_PRIVATE
_SET_SIGNAL_OF_PARENTS_END = 1  # PR_SET_PDEATHSIG


def enter(pid: int, kinds: int = NETWORK) -> None:
    """Move the calling thread into namespaces of a process. Sockets stay in the network that created them."""
    descriptor = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, kinds):
            raise OSError(ctypes.get_errno(), f"cannot enter namespaces of process {pid}")
    finally:
        os.close(descriptor)


def become_process(number: int) -> None:
    """Continue as the process with this id in a new PID namespace, in a child of this process.

    The namespace ends with this process, which ends with the child's exit status. It has no other threads.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_PIDS):
        raise OSError(ctypes.get_errno(), "cannot create a PID namespace")
    _continue_in_child(libc)  # as process 1
    _show_processes(libc)
    if number > 1:
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(number - 1))
        _continue_in_child(libc)


def _show_processes(libc: ctypes.CDLL) -> None:
    """Let /proc show the processes of this namespace, because vLLM reads its process's files there."""
    is_private = not libc.unshare(MOUNT) and not libc.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None)
    if not is_private or libc.mount(b"proc", b"/proc", b"proc", 0, None):
        raise OSError(ctypes.get_errno(), "cannot mount /proc of a PID namespace")


def _continue_in_child(libc: ctypes.CDLL) -> None:
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        os._exit(abs(os.waitstatus_to_exitcode(status)))
    libc.prctl(_SET_SIGNAL_OF_PARENTS_END, signal.SIGKILL)
