"""Byte streams to one server: plain ones and TLS.

What is sent and received goes straight between the kernel (or OpenSSL) and the caller's memory, and the GIL
is free meanwhile. One call never takes longer than the time-out.

- **Plain** sockets are blocking ones whose time-out the kernel keeps (``SO_RCVTIMEO``, ``SO_SNDTIMEO``): with
  Python's own time-outs each read would return after one packet, with ``MSG_WAITALL`` one call takes a whole
  part.
- **TLS** keeps Python's time-outs, since a blocking SSLSocket would wait for ever. OpenSSL gives and takes
  one record of 16 KiB at a time.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Sequence
from typing import Protocol

from lmcache.tiers.address import Endpoint, Tls


class Stream(Protocol):
    """A connected stream. Raises TimeoutError and ConnectionError, both OSError."""

    def send(self, views: Sequence[memoryview]) -> int:
        """Send some of these bytes, in order; return how many."""

    def receive(self, limit: int) -> bytes:
        """Return what has come, at most ``limit`` bytes; empty at the end of the stream."""

    def receive_into(self, target: memoryview) -> int:
        """Fill some of the target, all of it where the medium can; return how much, 0 at the end."""

    def close(self) -> None:
        """Close the socket."""


class PlainStream:
    """TCP or a UNIX socket."""

    def __init__(self, endpoint: Endpoint, timeout_seconds: float) -> None:
        self._socket = _connect(endpoint, timeout_seconds)
        self._socket.settimeout(None)
        limit = struct.pack("ll", int(timeout_seconds), int(timeout_seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self.close = self._socket.close

    def send(self, views: Sequence[memoryview]) -> int:
        """See Stream; all views in one call."""
        try:
            return self._socket.sendmsg(views)
        except BlockingIOError:
            raise TimeoutError from None

    def receive(self, limit: int) -> bytes:
        """See Stream."""
        try:
            return self._socket.recv(limit)
        except BlockingIOError:
            raise TimeoutError from None

    def receive_into(self, target: memoryview) -> int:
        """See Stream; all of it, unless the time-out or the end of the stream comes first."""
        try:
            return self._socket.recv_into(target, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError from None


class TlsStream:
    """TLS over TCP. A server that is not who it should be raises ConnectionError."""

    def __init__(self, endpoint: Endpoint, timeout_seconds: float, tls: Tls) -> None:
        context = _context(tls)
        plain = _connect(endpoint, timeout_seconds)
        try:
            self._socket = context.wrap_socket(plain, server_hostname=endpoint.host)
        except OSError as error:
            plain.close()
            if isinstance(error, ssl.SSLCertVerificationError):
                raise ConnectionError(
                    f"the server's certificate is refused: {error.verify_message}"
                ) from None
            raise ConnectionError(f"no TLS handshake: {error}") from None
        self.close = self._socket.close

    def send(self, views: Sequence[memoryview]) -> int:
        """See Stream."""
        try:
            return self._socket.send(views[0]) if views[0] else 0
        except ssl.SSLEOFError:
            raise ConnectionResetError("the server closed the connection") from None

    def receive(self, limit: int) -> bytes:
        """See Stream."""
        return self._socket.recv(limit)

    def receive_into(self, target: memoryview) -> int:
        """See Stream."""
        return self._socket.recv_into(target)


def open_stream(endpoint: Endpoint, timeout_seconds: float, tls: Tls | None) -> Stream:
    """Connect."""
    return TlsStream(endpoint, timeout_seconds, tls) if tls else PlainStream(endpoint, timeout_seconds)


def _connect(endpoint: Endpoint, timeout_seconds: float) -> socket.socket:
    if not endpoint.host.startswith("/"):
        connection = socket.create_connection(endpoint, timeout_seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_seconds)
    try:
        connection.connect(endpoint.host)
    except BaseException:
        connection.close()
        raise
    return connection


def _context(tls: Tls) -> ssl.SSLContext:
    """Read anew for every connection: certificates are renewed while we run."""
    try:
        context = ssl.create_default_context(cafile=tls.ca or None)
        if tls.cert:
            context.load_cert_chain(tls.cert, tls.key or None)
    except OSError as error:
        files = ", ".join(path for path in (tls.ca, tls.cert, tls.key) if path)
        raise ConnectionError(f"TLS: one of {files} can't be read: {error}") from None
    context.check_hostname = tls.verify == "full"
    if tls.verify == "none":
        context.verify_mode = ssl.CERT_NONE
    return context
