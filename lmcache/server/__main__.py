"""``python -m lmcache.server``, also installed as ``lmcache_server``."""

from __future__ import annotations

import argparse
import signal
import socket
import threading
from collections.abc import Sequence

from lmcache.protocol import MAX_LENGTH
from lmcache.server.server import LMCacheServer
from lmcache.tiers.errors import TierError


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM or SIGINT; exits with a sentence when it can't start."""
    options = _parse(arguments)
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
    """In a thread that is told by a socket: Python runs no handler while the main thread is in accept()."""
    told, telling = socket.socketpair()
    telling.setblocking(False)
    signal.set_wakeup_fd(telling.detach())  # open as long as the process lives
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)

    def wait() -> None:
        while told.recv(1):
            server.stop()

    threading.Thread(target=wait, daemon=True).start()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("lmcache_server", description="Keep KV chunks for engines (lm://).")
    add = parser.add_argument
    add("host", help="address to listen on; there is no authentication: keep it private")
    add("port", type=int, help="0: one that is free")
    add("storage", nargs="?", default="cpu", help='"cpu" (memory, the default) or a directory')
    add("--max-size-gb", type=float, help="GiB kept (default: 5 of memory, half of a directory's volume)")
    add(
        "--max-object-mb",
        type=int,
        default=1024,
        help="MiB of the largest object taken, and of all that are on their way together (default: 1024)",
    )
    add("--max-clients", type=int, default=256, help="connections at a time (default: 256)")
    add("--timeout-seconds", type=float, default=30, help="of one message; 1 s more per MiB (default: 30)")
    add("--idle-seconds", type=float, default=600, help="until a silent client is put off (default: 600)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
