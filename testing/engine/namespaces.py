"""Namespaces of Linux, which separate the nodes of ``two_nodes``."""

import ctypes
import os

MOUNT, NETWORK = 0x00020000, 0x40000000  # CLONE_NEWNS, CLONE_NEWNET


def enter(pid: int, kinds: int = NETWORK) -> None:
    """Move the calling thread into namespaces of a process. Sockets stay in the network that created them."""
    descriptor = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, kinds):
            raise OSError(ctypes.get_errno(), f"cannot enter namespaces of process {pid}")
    finally:
        os.close(descriptor)
