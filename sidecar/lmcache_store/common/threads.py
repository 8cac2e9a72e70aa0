"""Priorities of threads. The kernel has one for each thread, not only for each process."""

from __future__ import annotations

import contextlib
import os
import threading

NICENESS = 10
"""Niceness of threads whose results no request waits for. An engine on the same node then runs first."""


def lower_priority(niceness: int = NICENESS) -> None:
    """Give the calling thread this niceness, unless it is nicer already."""
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) < niceness:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
