"""Deadlines of engines and sidecars for each other. Other modules read ``TIMING``.

The standard values let requests wait only briefly: a cache failure must never be an inference failure. In a
debugger, set longer ones in the environment: ``LMCACHE_TIMING=lookup_seconds=60,call_seconds=60``.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, fields

from lmcache_store.common import options


@dataclass
class Timing:
    """Longest waits, in seconds."""

    # Engine for sidecar
    hello_seconds: float = 2.0
    """Time until the sidecar answers Hello: a frozen sidecar accepts connections but does not answer."""
    start_seconds: float = 2.0
    """Time until the cache is attached, while the engine starts. It suffices for weights whose hashes are
    known. The first request is then cached."""
    call_seconds: float = 2.0
    """Time until the sidecar answers a call for which no request waits."""
    lookup_seconds: float = 0.5
    """Time until the sidecar answers a lookup, unless the settings allow more."""
    part_seconds: float = 0.2
    """Time in which another part of the engine must answer a hint, unless three steps take longer."""
    report_seconds: float = 5.0
    """Time until a report of a blocking engine is sent. Older reports are dropped, as of a frozen sidecar."""
    row_seconds: float = 0.05
    """Time until the next row is promoted, unless computing the missing rows takes longer."""
    promotion_seconds: float = 10.0
    """Time until a request gets its answer, or one row more, however long computing takes."""
    first_row_seconds: float = 0.2
    """Time until the first row is promoted, unless the settings allow more: the tier's speed is unknown."""
    hold_seconds: float = 2.0
    """Time until the engine reuses the blocks of a finished request, even if a copy still reads them."""
    preemption_seconds: float = 0.005
    """Time until a step goes on without copies that read blocks of a preempted request."""
    left_behind_seconds: float = 0.05
    """Time until a step goes on without copies that read blocks which windows left behind. Without these
    copies, a long prompt could not be resumed."""
    close_seconds: float = 2.0
    """Time until the threads of a connector end. A thread may hang in the kernel."""

    # Sidecar for engine
    reader_start_seconds: float = 60.0
    """Time until a new GPU reader has a CUDA context: the driver may have to be loaded first."""
    reader_open_seconds: float = 30.0
    """Time until a GPU reader has opened an engine's memory."""
    copy_seconds: float = 30.0
    """Time until a batch of a GPU reader is copied, which takes a few milliseconds. It may take longer if
    other processes keep the GPU busy. The time starts again when the reader has registered memory."""
    reader_close_seconds: float = 1.5
    """Time until a GPU reader has closed memory. A restarted engine waits 2 s: this and the extra time."""
    greeting_seconds: float = 5.0
    """Time from the start of a connection to its settings, and from the start of a stream to its Hello."""
    page_seconds: float = 10.0
    """Time from the start of a connection for a page to its end."""

    # Sidecars for each other
    peer_password_seconds: float = 5.0
    """Time until another pod has sent its password, and time of its TLS handshake."""
    peer_send_seconds: float = 2.0
    """Time until another pod has read one reply. Otherwise, it loses its connection."""
    peer_pin_seconds: float = 1.0
    """Time until another pod reads the next piece of a row. Until then, the row stays in memory."""
    peer_turn_seconds: float = 2.0
    """Time until the event loop finds a row for a peer. Then the row counts as absent."""
    peer_offer_seconds: float = 1.0
    """Time until a row that another pod offers is read. By default, that pod waits as long."""

    def read(self, text: str) -> None:
        """Set the deadlines in ``text``, such as ``copy_seconds=0.5,hold_seconds=9``, others to standard.

        Raises ValueError if a name is unknown or a value is not a number.
        """
        words = dict(word.split("=", 1) for word in text.split(",") if word)
        if unknown := words.keys() - vars(self).keys():
            raise ValueError(f"{min(unknown)!r} is not one of {', '.join(vars(self))}")
        values = {name: options.SECONDS(word) for name, word in words.items()}
        vars(self).update({field.name: field.default for field in fields(self)} | values)


TIMING = Timing()
"""Deadlines of this process."""
try:
    TIMING.read(os.environ.get("LMCACHE_TIMING", ""))
except ValueError as error:
    logging.getLogger(__name__).warning("LMCACHE_TIMING has no effect: %s", error)
