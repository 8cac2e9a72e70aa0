"""Any bytes of a client of the peers' server end its connection or are answered, and leave no row pinned.

Input: a flag that says whether the server needs a password, and the bytes that the client sends before it
closes its side.
"""

import socket

from lmcache_sidecar.peer_server.requests import BadRequestError
from lmcache_sidecar.peer_server.service import PeerService
from lmcache_sidecar.peer_server.session import PeerSession
from tests.fuzz.target import Target
from tests.harness.tiers.peer_rows import PREFIX, Rows

PASSWORD = "secret"


def opened() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def run(data: bytes, listener: socket.socket) -> None:
    rows = Rows()
    rows.add(1, b"column 0", b"")
    passwords = (lambda: [PASSWORD]) if data[:1] == b"\1" else None
    service = PeerService(rows, PREFIX, passwords)
    with socket.create_connection(listener.getsockname()) as client:
        connection, _ = listener.accept()
        with connection:
            client.sendall(data[1:])
            client.shutdown(socket.SHUT_WR)
            session = PeerSession(service, connection)
            try:
                session.run()
            finally:
                session.release()
                assert not rows.pinned


TARGET = Target(run, (OSError, BadRequestError), opened=opened)
