"""A sidecar whose memory tier is made larger and smaller, as by a kubelet."""

from __future__ import annotations

import os
from pathlib import Path

from testing.processes import SidecarProcess

MIB = 1 << 20


class Sized:
    """A sidecar, and the file with its size as a kubelet writes it: a new one takes the place of the old."""

    def __init__(self, sidecar: SidecarProcess, path: Path) -> None:
        self.sidecar, self.path = sidecar, path

    def ask(self, text: str) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(text)
        os.replace(new, self.path)

    @property
    def memory(self) -> dict:
        return self.sidecar.stats()["memory"]

    def settle(self, mebibytes: int) -> dict:
        """Wait until it is as large as it is to be."""
        size = mebibytes * MIB

        def is_settled(memory: dict) -> bool:
            is_so = memory["target_bytes"] == memory["size_bytes"] == size
            return is_so and not memory["resize_problem"]

        self.sidecar.wait_until(lambda stats: is_settled(stats["memory"]))
        memory = self.memory
        assert self.taken_bytes() <= size + MIB
        return memory

    def taken_bytes(self) -> int:
        return self.sidecar.arena_path.stat().st_blocks * 512
