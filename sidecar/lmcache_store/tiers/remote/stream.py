"""Connections to one server, plain or with TLS.

The C library resolves names without a deadline. Each resolution therefore runs in its own thread, so that a
name server that never answers delays only that name's users.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any

from lmcache_store.common.sockets import Stream
from lmcache_store.tiers.remote.address import Endpoint, Tls

_Addresses = list[tuple[int, tuple[Any, ...]]]
_resolving: dict[Endpoint, Future[_Addresses]] = {}
_resolving_lock = threading.Lock()


class TlsStream(Stream):
    """TLS over TCP. OpenSSL handles one record of at most 16 KiB, in one buffer, at a time."""

    def _set_timeout(self) -> None:
        self._socket.settimeout(self._timeout)  # a blocking SSLSocket would wait forever

    def _send(self, views: Sequence[memoryview]) -> int:
        try:
            return self._socket.send(views[0])
        except ssl.SSLEOFError:
            raise ConnectionResetError("the peer closed the connection") from None

    def _receive_into(self, views: Sequence[memoryview]) -> int:
        return self._socket.recv_into(views[0])


def open_stream(endpoint: Endpoint, timeout_seconds: float, tls: Tls | None) -> Stream:
    """Connect to a server.

    Raises OSError. It is a ConnectionError if the server's certificate is invalid, or its name is not a valid
    host name."""
    try:
        return _open(endpoint, timeout_seconds, tls)
    except ValueError as error:  # an invalid name: UnicodeError, NUL bytes, ...
        raise ConnectionError(f"{endpoint} is not a valid host name: {error}") from None


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
    """Connect to the first address that answers. The time-out covers all addresses together."""
    deadline = time.monotonic() + timeout_seconds
    problem: OSError = ConnectionError(f"{endpoint.host} has no address")
    for family, address in _resolve(endpoint, timeout_seconds):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no connection within {timeout_seconds} s")
        try:
            return _connect(family, address, left)
        except TimeoutError:
            problem = TimeoutError(f"no connection to {address[0]} within {timeout_seconds} s")
        except OSError as error:
            problem = OSError(error.errno, f"{error.strerror} ({address[0]})")
    raise problem


def _resolve(endpoint: Endpoint, timeout_seconds: float) -> _Addresses:
    """Resolve a name. Concurrent calls for one name share one resolution."""
    with _resolving_lock:
        lookup = _resolving.get(endpoint)
        if lookup is None:
            lookup = Future()
            thread = threading.Thread(target=_look_up, args=(endpoint, lookup), name="resolver", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # too many threads
                raise ConnectionError(str(error)) from error
            _resolving[endpoint] = lookup
    try:
        return lookup.result(timeout_seconds)
    except socket.gaierror as error:  # its number has another meaning in each C library
        raise ConnectionError(f"cannot resolve the host: {error.strerror}") from None
    except NotYet:
        raise TimeoutError(f"the name {endpoint.host} was not resolved within {timeout_seconds} s") from None


def _look_up(endpoint: Endpoint, lookup: Future[_Addresses]) -> None:
    try:
        addresses = socket.getaddrinfo(*endpoint, type=socket.SOCK_STREAM)
        lookup.set_result([(family, address) for family, _, _, _, address in addresses])
    except Exception as error:  # including UnicodeError for an invalid name
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
        raise ConnectionError(f"the TLS handshake failed: {error}") from None


def accept_tls(connection: socket.socket, tls: Tls) -> ssl.SSLSocket:
    """Serve TLS on a connection that a client opened. The caller calls ``do_handshake``.

    Raises OSError if the certificate can't be read. Reads the files each time, because certificates are
    renewed.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with _reading(tls):
        context.load_cert_chain(tls.cert, tls.key or None)
    return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)


@contextlib.contextmanager
def _reading(tls: Tls) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        files = ", ".join(path for path in (tls.ca, tls.cert, tls.key) if path)
        raise ConnectionError(f"TLS: one of {files} can't be read: {error}") from None


def _context(tls: Tls) -> ssl.SSLContext:
    """Create a TLS context. Reads the files for every connection, because certificates are renewed."""
    with _reading(tls):
        context = ssl.create_default_context(cafile=tls.ca or None)
        if tls.cert:
            context.load_cert_chain(tls.cert, tls.key or None)
    context.check_hostname = tls.verify == "full"
    if tls.verify == "none":
        context.verify_mode = ssl.CERT_NONE
    return context
