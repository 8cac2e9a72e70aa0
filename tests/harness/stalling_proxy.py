"""A proxy before a Redis server that holds back requests of one command."""

from __future__ import annotations

import contextlib
import socket
import threading


class StallingProxy:
    """Forwards connections to a port of this machine; a context manager."""

    def __init__(self, port: int) -> None:
        self._target_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._command = b""  # requests with this text are held back; empty: none
        self._passes = threading.Event()
        self._passes.set()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._begin(self._accept)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> StallingProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.resume()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60)
        for connection in self._sockets:
            connection.close()

    def stall(self, command: bytes) -> None:
        """Hold back requests of this command, and all later bytes of their connections."""
        self._passes.clear()
        self._command = command

    def resume(self) -> None:
        """Send what was held back."""
        self._command = b""
        self._passes.set()

    def _begin(self, function: object, *arguments: object) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:
                return
            self._sockets += [client, server]
            self._begin(self._forward, client, server, True)
            self._begin(self._forward, server, client, False)

    def _forward(self, source: socket.socket, target: socket.socket, is_request: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if is_request and self._command and self._command in data:
                    self._passes.wait()
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
