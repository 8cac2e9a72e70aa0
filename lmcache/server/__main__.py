"""The program ``python -m lmcache.server``, which is also installed as ``lmcache_server``."""

from __future__ import annotations

import argparse
import signal
import socket
import threading
from collections.abc import Sequence

from lmcache.protocol import MAX_LENGTH
from lmcache.server.server import LMCacheServer
from lmcache_store.common.options import Parser, describe
from lmcache_store.tiers.errors import TierError


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the server until SIGTERM or SIGINT. If it can't start, exit with an error message."""
    options = _parser().parse_args(arguments)
    try:
        server = LMCacheServer(
            options.host,
            options.port,
            options.storage,
            max_size_gb=options.max_size_gb,
            max_object_bytes=min(options.max_object_mb << 20, MAX_LENGTH),
            max_clients=options.max_clients,
            timeout_seconds=options.timeout_seconds,
            idle_seconds=options.idle_seconds,
        )
    except (OSError, OverflowError, ValueError, TierError) as error:
        raise SystemExit(f"lmcache_server: {error}") from error
    _stop_at_signals(server)
    print(f"lmcache_server: listening on {options.host}:{server.port}", flush=True)
    server.run()


def _stop_at_signals(server: LMCacheServer) -> None:
    """Stop the server at SIGTERM or SIGINT.

    A thread waits for signals on a socket, because Python runs no handler while the main thread is in
    accept().
    """
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    signal.set_wakeup_fd(sender.detach())  # stays open until the process ends
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)

    def wait() -> None:
        while receiver.recv(1):
            server.stop()

    threading.Thread(target=wait, daemon=True).start()


def _parser() -> argparse.ArgumentParser:
    parser = Parser("lmcache_server")
    describe(parser, "Store KV chunks for engines (lm://).", "", "127.0.0.1 65432", "127.0.0.1 65432 /var/kv")
    add = parser.add_argument
    add("host", help="address to listen on; use a private one, because there is no authentication")
    add("port", type=int, help="port to listen on; 0 chooses a free one")
    add("storage", nargs="?", default="cpu", help='"cpu" (memory, the default) or a directory')
    add("--max-size-gb", type=float, help="GiB to store (default: 5 in memory, half of a directory's volume)")
    add(
        "--max-object-mb",
        type=int,
        default=1024,
        help="MiB of the largest object, and of all incomplete objects together (default: 1024)",
    )
    add("--max-clients", type=int, default=256, help="largest number of connections (default: 256)")
    add("--timeout-seconds", type=float, default=30, help="per message, plus 1 s per MiB (default: 30)")
    add("--idle-seconds", type=float, default=600, help="disconnect clients idle for so long (default: 600)")
    return parser


if __name__ == "__main__":
    main()
