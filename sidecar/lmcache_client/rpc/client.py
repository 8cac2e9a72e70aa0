"""A synchronous, thread-safe client of one sidecar, for engines. It does not need torch.

::

    client = SidecarClient("/run/lmcache/kvcache.sock", hello)
    client.start()                      # returns at once; attaches and re-attaches in the background
    session = client.session            # None while detached
    if session is not None:
        result = session.lookup("request-1", [(0, row_keys)])

No call blocks longer than its deadline, and every failure is a ``SidecarError``.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import os
import threading
import time
import traceback
import uuid
from pathlib import Path

import grpc

from lmcache_client.cuda.pin_status import PinStatus
from lmcache_client.off_notice import OffNotice
from lmcache_client.rpc import service
from lmcache_client.rpc.attachment import Attachment, OnRows, hello_message
from lmcache_client.rpc.errors import SidecarError
from lmcache_client.rpc.hello import ClientHello
from lmcache_client.rpc.open_copies import OpenCopies
from lmcache_client.rpc.session import SidecarSession, bounded
from lmcache_store.common.backoff import Backoff

logger = logging.getLogger(__name__)

_BACKOFF = Backoff(0.05, 2.0, jitter=0.5)
_PROTOCOL_BACKOFF = Backoff(30.0, 30.0, jitter=0.5)
"""Slow retries after a mismatch of protocol versions, which only an upgrade resolves."""

_STABLE_SECONDS = 10.0
"""Duration after which a session counts as successful: the next attempt then starts without back-off."""

_CLOSE_SECONDS = 2.0


class SidecarClient:
    """Keeps a client attached to a sidecar, which may be absent, slow, frozen or restarted at any time.

    In a forked child, the client is detached. ``close`` runs at interpreter exit if it was not called before.
    """

    def __init__(
        self,
        socket_path: str,
        hello: ClientHello,
        *,
        on_rows: OnRows | None = None,
        notice: OffNotice | None = None,
    ) -> None:
        """Create a detached client; ``start`` attaches it.

        Args:
            socket_path: UNIX socket of the sidecar.
            hello: identity of this client.
            on_rows: called on another background thread whenever its arguments change. These are this
                worker's column of the arena ``[num_rows, slot_bytes]``, the number of leading rows that may
                be accessed, and whether no copy of an older column is running. On return, no device may have
                other rows of this column pinned, nor rows of an older column without running copies.
                Otherwise it must raise.
            notice: warns while the client is detached.

        Raises ValueError if the system can't use a ``socket_path`` of this length.
        """
        service.check_socket_path(socket_path)
        client_uuid = uuid.uuid4().bytes
        self._socket_path = socket_path
        self._hello = hello_message(hello, client_uuid)
        self._on_rows = on_rows
        self._notice = notice or OffNotice()
        self._pid = os.getpid()
        self._lock_file = LockFile(service.lock_path(socket_path, client_uuid))
        self._copies = OpenCopies(self._wake)
        self._pending_releases: set[str] = set()  # ids whose release has not reached the sidecar yet
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lmcache-attach", daemon=True)
        self._attachment: Attachment | None = None
        self._session: SidecarSession | None = None
        self.detached_reason = "not attached yet"
        """Why there is no session, in one sentence; empty while there is a session."""
        self._pins: PinStatus | None = None

    def start(self) -> None:
        """Start attaching in the background. Returns at once."""
        atexit.register(self.close)
        self._thread.start()

    @property
    def session(self) -> SidecarSession | None:
        """The present session, or None while detached."""
        return self._session if os.getpid() == self._pid else None

    def release_later(self, request_id: str) -> None:
        """End a lease with the next release or attach. Use this while there is no session."""
        self._pending_releases.add(bounded(request_id))

    def report_pins(self, status: PinStatus) -> None:
        """Report how much of this worker's column is pinned, now and after every attach."""
        self._pins = status
        if (attachment := self._attachment) is not None:
            attachment.report_pins(status)

    def close(self) -> None:
        """Detach, release the record lock and remove its file. Idempotent; waits at most 2 s.

        While a ``copying`` block is open, the process holds the lock: its slots must not be reused yet.
        """
        if os.getpid() != self._pid or self._closing.is_set():
            return
        self._closing.set()
        atexit.unregister(self.close)
        if (attachment := self._attachment) is not None:
            attachment.cancel()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_SECONDS)
        if self._copies.is_idle and not self._thread.is_alive():
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
                _clear_frames(error)
            except Exception as error:  # this thread must survive any error, such as of a broken file system
                reason = str(error)
                _clear_frames(error)
            self._detached(reason)
            num_failures = 1 if time.monotonic() - started > _STABLE_SECONDS else num_failures + 1
            self._closing.wait(backoff.seconds(num_failures))

    def _attach(self) -> None:
        """Serve one stream until it ends."""
        if not os.path.exists(self._socket_path):
            raise OSError(f"no socket at {self._socket_path}: is the sidecar up and its directory mounted?")
        if problem := service.directory_problem(os.path.dirname(self._socket_path) or "."):
            raise OSError(f"the socket's owner may be an attacker: {problem}")
        self._lock_file.acquire()
        attachment = self._attachment = Attachment(
            self._socket_path, self._hello, self._copies, self._pending_releases, self._on_rows
        )
        if (pins := self._pins) is not None:  # a later report_pins() finds this attachment
            attachment.report_pins(pins)
        try:
            if not self._closing.is_set():  # close() may not have found this attachment
                attachment.run(self._attached)
        finally:
            self._attachment = None

    def _attached(self, session: SidecarSession) -> None:
        self._session, self.detached_reason = session, ""
        self._notice.clear()
        about = "LMCache Cluster is on. Attached to the sidecar at %s, epoch %d"
        logger.info(about, self._socket_path, session.epoch)
        if self._pending_releases:
            with contextlib.suppress(SidecarError):  # they stay pending
                session.release(list(self._pending_releases))

    def _detached(self, reason: str) -> None:
        if not self._closing.is_set():
            self._notice.warn(reason)
        self.detached_reason = reason
        self._session = None

    def _wake(self) -> None:
        if (attachment := self._attachment) is not None:
            attachment.wake()


def _clear_frames(error: BaseException | None) -> None:
    """Drop the references that an error's frames hold.

    gRPC raises the stream itself, and the frames refer to the stream. This cycle would keep the session, its
    mapping of the arena and the pinned memory alive until a garbage collection, which engines postpone.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


class LockFile:
    """Proves that a client is alive: a POSIX record lock on a file next to the socket. Not thread-safe.

    The lock is held from ``acquire`` to ``release``, or to the end of the process, for whatever reason, and
    never less. A forked child does not inherit it. Closing any descriptor of the file would release it too,
    so only this class opens the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def acquire(self) -> None:
        """Create the file and lock it, unless this lock already holds it. Raises OSError."""
        if self._is_in_place():
            return
        self._close()
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
        except FileNotFoundError as error:
            raise OSError(f"{self._path.parent} is missing: the sidecar creates it at its start") from error
        with contextlib.suppress(PermissionError):  # another user created the file, and granted access to it
            os.fchmod(self._fd, 0o660)  # despite the umask: the sidecar may run as another user of the group
        fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        """Remove the file, then unlock it. A file that exists without a lock proves that its client died."""
        if self._is_in_place():
            self._path.unlink(missing_ok=True)
        self._close()

    def _is_in_place(self) -> bool:
        """Return True if the locked file still exists at its path, and was not replaced."""
        if self._fd < 0:
            return False
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except OSError:
            return False

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
