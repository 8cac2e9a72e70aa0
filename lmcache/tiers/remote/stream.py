"""Connecting to one server: plain, or by TLS.

Names are resolved by the C library, which knows no deadline: in threads of their own, of which one that is
never answered keeps nobody but itself waiting.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any

from lmcache.stream import Stream
from lmcache.tiers.remote.address import Endpoint, Tls

_Found = list[tuple[int, tuple[Any, ...]]]
_resolving: dict[Endpoint, Future[_Found]] = {}
_resolving_lock = threading.Lock()


class TlsStream(Stream):
    """TLS over TCP. OpenSSL gives and takes one record of 16 KiB at a time, of one piece of memory."""

    def _set_timeout(self) -> None:
        self._socket.settimeout(self._timeout)  # a blocking SSLSocket would wait for ever

    def _send(self, views: Sequence[memoryview]) -> int:
        try:
            return self._socket.send(views[0])
        except ssl.SSLEOFError:
            raise ConnectionResetError("the peer closed the connection") from None

    def _receive_into(self, views: Sequence[memoryview]) -> int:
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
        connection = _connect(socket.AF_UNIX, endpoint.host, timeout_seconds)
    else:
        connection = _connect_to_host(endpoint, timeout_seconds)
    try:
        connection.settimeout(timeout_seconds)
        if tls:
            return TlsStream(_shake_hands(connection, endpoint.host, tls), timeout_seconds)
        return Stream(connection, timeout_seconds)
    except BaseException:
        connection.close()
        raise


def _connect(family: int, address: str | tuple[Any, ...], timeout_seconds: float) -> socket.socket:
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_seconds)
        connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def _connect_to_host(endpoint: Endpoint, timeout_seconds: float) -> socket.socket:
    """By the first of its addresses that answers; all of them together have the time-out."""
    deadline = time.monotonic() + timeout_seconds
    problem: OSError = ConnectionError(f"{endpoint.host} has no address")
    for family, address in _resolve(endpoint, timeout_seconds):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no connection within {timeout_seconds} s")
        try:
            return _connect(family, address, left)
        except OSError as error:
            problem = error
    raise problem


def _resolve(endpoint: Endpoint, timeout_seconds: float) -> _Found:
    """One look-up of a name at a time, however many wait for it, or gave up."""
    with _resolving_lock:
        lookup = _resolving.get(endpoint)
        if lookup is None:
            lookup = Future()
            thread = threading.Thread(target=_look_up, args=(endpoint, lookup), name="resolver", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # too many
                raise ConnectionError(str(error)) from error
            _resolving[endpoint] = lookup
    try:
        return lookup.result(timeout_seconds)
    except NotYet:
        raise TimeoutError(f"the name {endpoint.host} was not resolved within {timeout_seconds} s") from None


def _look_up(endpoint: Endpoint, lookup: Future[_Found]) -> None:
    try:
        found = socket.getaddrinfo(*endpoint, type=socket.SOCK_STREAM)
        lookup.set_result([(family, address) for family, _, _, _, address in found])
    except Exception as error:  # UnicodeError of a name that none can have, too
        lookup.set_exception(error)
    finally:
        with _resolving_lock:
            del _resolving[endpoint]


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
