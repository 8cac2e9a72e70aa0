"""Sizes of the GPU measurements, and tables of their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Scale:
    copy_bytes: int = 256 << 20
    """Bytes of each measured batch of copies. ``max_pieces`` limits batches of small pieces."""
    max_pieces: int = 16384
    rounds: int = 7
    pin_bytes: int = 4 << 30
    kernel_bytes: int = 256 << 20
    """Device memory that a run of the kernel reads, in about 0.1 ms."""
    kernel_runs: int = 2000


TINY = Scale(4 << 20, 256, 2, 32 << 20, 1 << 20, 20)
"""Sizes for a quick run that only checks the program."""


@dataclass
class Section:
    """A table of the report."""

    title: str
    headings: Sequence[str]
    text: str
    """Description of the measurement."""
    rows: list[Sequence[str]] = field(default_factory=list)

    def markdown(self) -> str:
        lines = [self.headings, ["---"] * len(self.headings), *self.rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"## {self.title}\n{self.text}\n\n{table}\n"


def held(value: float, bar: float, *, is_least: bool = False) -> str:
    """Return a bar, and whether a value holds it."""
    sign, holds = ("≥", value >= bar) if is_least else ("≤", value <= bar)
    return f"{sign} {bar:g}, {'held' if holds else '**not held**'}"


def size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"
