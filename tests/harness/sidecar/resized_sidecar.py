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
        expected = mebibytes * MIB, mebibytes * MIB, ""
        names = "target_bytes", "size_bytes", "resize_problem"
        self.sidecar.wait_until(lambda stats: tuple(stats["memory"][name] for name in names) == expected)
        assert self.used_bytes() <= expected[0] + MIB
        return self.memory

    def wait_problem(self, text: str = "") -> None:
        """Wait until a resize has a problem that contains this text."""
        self.sidecar.wait_until(
            lambda stats: (problem := stats["memory"]["resize_problem"]) and text in problem
        )

    def used_bytes(self) -> int:
        return self.sidecar.arena_path.stat().st_blocks * 512
