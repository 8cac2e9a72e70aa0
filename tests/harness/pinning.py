"""A device that pins memory, as the arena sees it."""

import numpy as np


class Device:
    """Pins rows of one mapping. It still sees the old content of rows that are punched while pinned."""

    def __init__(self, slots: np.ndarray) -> None:
        self.slots = slots
        self.pinned: set[int] = set()
        self.old_pages: dict[int, np.ndarray] = {}

    def set_ready(self, num_rows: int) -> None:
        self.pinned = set(range(num_rows))
        self.old_pages = {row: page for row, page in self.old_pages.items() if row in self.pinned}

    def page(self, row: int) -> np.ndarray:
        return self.old_pages.get(row, self.slots[row])

    def before_punch(self, rows: range) -> None:
        for row in self.pinned.intersection(rows):
            self.old_pages.setdefault(row, self.slots[row].copy())
