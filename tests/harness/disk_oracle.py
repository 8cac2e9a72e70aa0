"""What a disk tier holds and what it evicts next, kept in the plainest way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.harness.disk_world import PAGE
from tests.harness.memory_oracle import Order


@dataclass
class Known:
    """An object as the tier knows it."""

    taken: int  # bytes
    content: bytes | None  # None: something else is in its place
    used: int = 0  # when


def file_bytes(payload_bytes: int) -> int:
    return PAGE + -(-payload_bytes // PAGE) * PAGE


class DiskOracle:
    """Objects by number; an epoch is an eighth of the capacity."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.objects: dict[int, Known] = {}
        self.clock = 0
        self.restart()

    @property
    def taken(self) -> int:
        return sum(known.taken for known in self.objects.values())

    def restart(self) -> None:
        """Replay all uses."""
        self.order = Order()
        self.epoch = self.epoch_left = 0
        for number, known in sorted(self.objects.items(), key=lambda item: item[1].used):
            self.order.add_tail(number, self.enter(known.taken))

    def enter(self, num_bytes: int) -> int:
        if self.epoch_left <= 0:
            self.epoch += 1
            self.epoch_left = self.capacity // 8
        self.epoch_left -= num_bytes
        return self.epoch

    def use(self, number: int) -> None:
        self.clock += 1
        self.objects[number].used = self.clock
        self.order.add_tail(number, self.enter(self.objects[number].taken))

    def touch(self, numbers: Sequence[int]) -> None:
        here = [number for number in numbers if number in self.objects]
        for number in here:
            self.clock += 1
            self.objects[number].used = self.clock
        self.order.add_head(here, self.enter(sum(self.objects[number].taken for number in here)))

    def make_room(self, taken: int) -> None:
        while self.taken + taken > self.capacity:
            self.discard(self.order.victims()[0])

    def store(self, number: int, content: bytes) -> None:
        taken = file_bytes(len(content))
        self.make_room(taken)
        self.objects[number] = Known(taken, content)
        self.use(number)

    def discard(self, number: int) -> bool:
        self.order.remove(number)
        return self.objects.pop(number, None) is not None
