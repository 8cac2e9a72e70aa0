"""How large the measurements are, and what one of them shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Scale:
    copy_bytes: int = 256 << 20
    """Of each measured batch of copies, if its pieces are not so small that there would be too many."""
    max_pieces: int = 16384
    rounds: int = 7
    pin_bytes: int = 4 << 30
    kernel_bytes: int = 256 << 20
    """Device memory that a run of the kernel reads: some 0.1 ms."""
    kernel_runs: int = 2000


TINY = Scale(4 << 20, 256, 2, 32 << 20, 1 << 20, 20)
"""Shows that the measurements run, and nothing else."""


@dataclass
class Section:
    """A table of the report."""

    title: str
    headings: Sequence[str]
    text: str
    """What was done."""
    rows: list[Sequence[str]] = field(default_factory=list)

    def markdown(self) -> str:
        lines = [self.headings, ["---"] * len(self.headings), *self.rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"## {self.title}\n{self.text}\n\n{table}\n"


def held(value: float, bar: float, *, is_least: bool = False) -> str:
    """A bar, and whether a value holds it."""
    sign, holds = ("≥", value >= bar) if is_least else ("≤", value <= bar)
    return f"{sign} {bar:g}, {'held' if holds else '**not held**'}"


def size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"
