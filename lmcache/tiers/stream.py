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

from lmcache.tiers.address import Endpoint, Tls


class Stream:
    """A connected TCP or UNIX socket. Raises OSError; BlockingIOError and TimeoutError: time is up."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, views: Sequence[memoryview]) -> int:
        """Send some of these bytes, in order; return how many."""
        return self._socket.sendmsg(views)

    def receive(self, limit: int) -> bytes:
        """Return what has come, at most ``limit`` bytes; empty at the end of the stream."""
        return self._socket.recv(limit)

    def receive_into(self, views: Sequence[memoryview]) -> int:
        """Fill some of these, in order, all of them where the medium can; return how much, 0 at the end."""
        return self._socket.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class TlsStream(Stream):
    """TLS over TCP."""

    def send(self, views: Sequence[memoryview]) -> int:
        """See Stream; OpenSSL takes one piece of memory."""
        try:
            return self._socket.send(views[0])
        except ssl.SSLEOFError:
            raise ConnectionResetError("the server closed the connection") from None

    def receive_into(self, views: Sequence[memoryview]) -> int:
        """See Stream; OpenSSL gives one record."""
        return self._socket.recv_into(views[0])


def open_stream(endpoint: Endpoint, timeout_seconds: float, tls: Tls | None) -> Stream:
    """Connect. A server that is not who it should be raises ConnectionError, and so does a name that none can
    have."""
    try:
        return _open(endpoint, timeout_seconds, tls)
    except ValueError as error:  # UnicodeError of the encoding of names, NUL bytes, ...
        raise ConnectionError(f"{endpoint} names no host: {error}") from None


def _open(endpoint: Endpoint, timeout_seconds: float, tls: Tls | None) -> Stream:
    if endpoint.host.startswith("/"):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        connection = socket.create_connection(endpoint, timeout_seconds)
    try:
        if endpoint.host.startswith("/"):
            connection.settimeout(timeout_seconds)
            connection.connect(endpoint.host)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls:
            return TlsStream(_shake_hands(connection, endpoint.host, tls))
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    limit = struct.pack("ll", int(timeout_seconds), int(timeout_seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return Stream(connection)


def _shake_hands(connection: socket.socket, host: str, tls: Tls) -> ssl.SSLSocket:
    context = _context(tls)
    try:
        return context.wrap_socket(connection, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        raise ConnectionError(f"the server's certificate is refused: {error.verify_message}") from None
    except OSError as error:
        raise ConnectionError(f"no TLS handshake: {error}") from None


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
