"""The engine's end of the wire: a sync, thread-safe, torch-free client of one sidecar.

::

    client = SidecarClient("/run/lmcache/kvcache.sock", hello)
    client.start()                      # returns at once; attaches and re-attaches in the background
    session = client.session            # None while detached
    if session is not None:
        found = session.lookup("request-1", [(0, row_keys)])

Nothing here blocks longer than its deadline, and every failure is a ``SidecarError``.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
import traceback
import uuid
from collections.abc import Callable

import grpc

from lmcache.backoff import Backoff
from lmcache.cuda.pin_status import PinStatus
from lmcache.kv_groups import KVGroup
from lmcache.rpc import service
from lmcache.rpc.attachment import Attachment, OnRows, hello_message
from lmcache.rpc.errors import SidecarError
from lmcache.rpc.hello import ClientHello, Role, TransferOffer
from lmcache.rpc.lockfile import LockFile
from lmcache.rpc.session import Copies, Scheduled, Session, bounded

__all__ = [
    "ClientHello",
    "KVGroup",
    "OnRows",
    "Role",
    "Scheduled",
    "Session",
    "SidecarClient",
    "TransferOffer",
]

logger = logging.getLogger(__name__)

_BACKOFF = Backoff(0.05, 2.0, jitter=0.5)
_PROTOCOL_BACKOFF = Backoff(30.0, 30.0, jitter=0.5)
"""Against another protocol version only an upgrade helps."""

_STABLE_SECONDS = 10.0
"""A session that lasted so long was a good one: the next attempt comes soon."""

_CLOSE_SECONDS = 2.0


class SidecarClient:
    """Keeps one client attached to a sidecar that may be absent, slow, frozen or restarted at any time.

    Forked children see a detached client. ``close`` runs at interpreter exit if it was not called before.
    """

    def __init__(
        self,
        socket_path: str,
        hello: ClientHello,
        *,
        on_change: Callable[[], None] | None = None,
        on_rows: OnRows | None = None,
    ) -> None:
        """``on_change`` is called from the background thread when ``session`` became another; it must not
        block. ``on_rows`` gets this worker's column of the arena, ``[num_rows, slot_bytes]``, how many
        leading rows may be touched, and whether no copy of an older column goes on; from another background
        thread whenever that changed. When it returns, no device has other rows pinned (of an older column,
        none where no copy goes on), or it raises.

        Raises ValueError when ``socket_path`` is longer than the system takes.
        """
        service.check_socket_path(socket_path)
        client_uuid = uuid.uuid4().bytes
        self._socket_path = socket_path
        self._hello = hello_message(hello, client_uuid)
        self._on_change = on_change or (lambda: None)
        self._on_rows = on_rows
        self._pid = os.getpid()
        self._lock_file = LockFile(service.lock_path(socket_path, client_uuid))
        self._copies = Copies(self._wake)
        self._pending_releases: set[str] = set()  # ids of requests whose release did not arrive yet
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lmcache-attach", daemon=True)
        self._attachment: Attachment | None = None
        self._session: Session | None = None
        self._reason = "not attached yet"
        self._pins: PinStatus | None = None

    def start(self) -> None:
        """Start attaching in the background. Returns at once, whatever the sidecar does."""
        atexit.register(self.close)
        self._thread.start()

    @property
    def session(self) -> Session | None:
        """The present session, or None while detached."""
        return self._session if os.getpid() == self._pid else None

    @property
    def detached_reason(self) -> str:
        """One sentence why there is no session; empty while there is one."""
        return "" if self.session is not None else self._reason

    def release_later(self, request_id: str) -> None:
        """Let a lease end with the next release or attach, where there is nobody to call now."""
        self._pending_releases.add(bounded(request_id))

    def report_pins(self, status: PinStatus) -> None:
        """Tell the sidecar how much of this worker's column is pinned, now and whenever it attaches."""
        self._pins = status
        if (attachment := self._attachment) is not None:
            attachment.report_pins(status)

    def close(self) -> None:
        """Detach, release the record lock and remove its file. Idempotent; waits at most 2 s.

        While a ``copying`` block is open the lock stays with the process: its slots can't be given away yet.
        """
        if os.getpid() != self._pid or self._closing.is_set():
            return
        self._closing.set()
        atexit.unregister(self.close)
        if (attachment := self._attachment) is not None:
            attachment.cancel()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_SECONDS)
        if self._copies.idle and not self._thread.is_alive():
            self._lock_file.release()

    def _run(self) -> None:
        num_failures = 0
        while not self._closing.is_set():
            started, backoff = time.monotonic(), _BACKOFF
            try:
                self._attach()
                reason = "the sidecar ended the session"
            except grpc.RpcError as error:
                reason = error.details() or error.code().name
                if service.reason_of(error) == service.REASON_PROTOCOL:
                    backoff = _PROTOCOL_BACKOFF
                _let_go(error)
            except Exception as error:  # this thread must outlive whatever a broken file system comes up with
                reason = str(error)
                _let_go(error)
            self._detached(reason)
            num_failures = 1 if time.monotonic() - started > _STABLE_SECONDS else num_failures + 1
            self._closing.wait(backoff.seconds(num_failures))

    def _attach(self) -> None:
        """Serve one stream to its end."""
        if not os.path.exists(self._socket_path):
            raise OSError(f"no socket at {self._socket_path}: is the sidecar up and its directory mounted?")
        self._lock_file.acquire()
        attachment = Attachment(
            self._socket_path, self._hello, self._copies, self._pending_releases, self._on_rows
        )
        self._attachment = attachment
        if (pins := self._pins) is not None:  # else report_pins() sees this attachment
            attachment.report_pins(pins)
        try:
            if not self._closing.is_set():  # else close() has not seen this attachment
                attachment.run(self._attached)
        finally:
            self._attachment = None

    def _attached(self, session: Session) -> None:
        self._session, self._reason = session, ""
        logger.info("Attached to the sidecar at %s, epoch %d", self._socket_path, session.epoch)
        self._on_change()
        if self._pending_releases:
            with contextlib.suppress(SidecarError):  # they stay pending
                session.release(list(self._pending_releases))

    def _detached(self, reason: str) -> None:
        if reason != self._reason and not self._closing.is_set():
            logger.warning("Not attached to the sidecar, going on without it: %s", reason)
        self._reason = reason
        if self._session is not None:
            self._session = None
            self._on_change()

    def _wake(self) -> None:
        if (attachment := self._attachment) is not None:
            attachment.wake()


def _let_go(error: BaseException | None) -> None:
    """Clear what an error's frames refer to.

    gRPC raises the stream itself, which they refer to: such a circle keeps the session and its mapping of the
    arena, with all that a GPU's driver has pinned of it, until a garbage collection. Engines put that off.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
