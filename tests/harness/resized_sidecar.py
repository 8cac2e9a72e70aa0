"""A sidecar whose memory tier is resized as by a kubelet."""

import os
from pathlib import Path

from testing.processes import SidecarProcess

MIB = 1 << 20


class ResizedSidecar:
    """A sidecar and the file with its size. As a kubelet does, each write replaces the file by a new one."""

    def __init__(self, sidecar: SidecarProcess, path: Path) -> None:
        self.sidecar, self.path = sidecar, path

    def write_size(self, text: str) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(text)
        os.replace(new, self.path)

    @property
    def memory(self) -> dict:
        return self.sidecar.stats()["memory"]

    def settle(self, mebibytes: int) -> dict:
        """Wait until the tier has this size and no resize is in progress."""
        size = mebibytes * MIB

        def is_settled(memory: dict) -> bool:
            is_resized = memory["target_bytes"] == memory["size_bytes"] == size
            return is_resized and not memory["resize_problem"]

        self.sidecar.wait_until(lambda stats: is_settled(stats["memory"]))
        memory = self.memory
        assert self.used_bytes() <= size + MIB
        return memory

    def used_bytes(self) -> int:
        return self.sidecar.arena_path.stat().st_blocks * 512
