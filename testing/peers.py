"""Sidecars that read each other's memory tiers, as the operator starts them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from testing.child_process import free_ports
from testing.processes import SidecarProcess


class PeerSidecars:
    """``with PeerSidecars(folder) as pods:`` starts ``number`` sidecars, with a list and a password.

    ``options`` are those of the sidecars' command line. By default they are patient, so that a busy machine
    does not turn hits into misses.
    """

    def __init__(self, folder: Path, number: int = 2, **options: Any) -> None:
        self.list = folder / "peers.yaml"
        self.passwords = folder / "password"
        self.passwords.write_text("secret\n")
        self.names = [f"127.0.0.1:{port}" for port in free_ports(number)]
        self.set_peers(*self.names)
        self.sidecars = [self._sidecar(name, options) for name in self.names]
        self._running = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as running:
            for sidecar in self.sidecars:
                running.enter_context(sidecar)
            for sidecar in self.sidecars:  # the first ones started before the others could answer
                sidecar.wait_until(
                    lambda stats: not any(each["problem"] for each in stats["peers"]["servers"])
                )
            self._running = running.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.__exit__(kind, error, trace)

    def set_peers(self, *names: str) -> None:
        """Replace the list, as the kubelet does."""
        new = self.list.with_suffix(".new")
        new.write_text(f"peers: [{', '.join(names)}]\n")
        new.replace(self.list)

    def _sidecar(self, name: str, options: dict[str, Any]) -> SidecarProcess:
        host, _, port = name.partition(":")
        usual: dict[str, Any] = {
            "memory_size": "1Mi",
            "peer_answer_seconds": 30,
            "remote_timeout_seconds": 30,
            "peers_file": self.list,
            "peer_name": name,
            "peer_host": host,
            "peer_port": port,
            "peer_password_file": self.passwords,
        }
        return SidecarProcess(**usual | options)
