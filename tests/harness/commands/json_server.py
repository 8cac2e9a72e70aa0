"""HTTP servers in a thread of the test, which answer in JSON."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JsonHandler(BaseHTTPRequestHandler):
    """Answers in JSON, and logs nothing."""

    def body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def answer(self, content: Any, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def serving(
    handler: type[BaseHTTPRequestHandler], address: tuple[str, int] = ("127.0.0.1", 0), **fields: Any
) -> Iterator[ThreadingHTTPServer]:
    """Run a server until the block ends. Its handlers find ``fields`` in their class."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    server_type = type("Server", (ThreadingHTTPServer,), {"address_family": family})
    with server_type(address, type(handler.__name__, (handler,), fields)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
