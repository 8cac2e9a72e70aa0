"""A plain model of a disk tier: which objects it holds, and which one it evicts next."""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.harness.disk_world import PAGE
from tests.harness.memory_oracle import Order


@dataclass
class Known:
    """An object in the tier."""

    num_bytes: int
    content: bytes | None
    """The stored bytes. None if the file was replaced by something else."""
    used: int = 0
    """Clock of the last use."""


def file_bytes(payload_bytes: int) -> int:
    return PAGE + -(-payload_bytes // PAGE) * PAGE


class DiskOracle:
    """Objects by number. An epoch ends after an eighth of the capacity."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.objects: dict[int, Known] = {}
        self.clock = 0
        self.restart()

    @property
    def num_bytes(self) -> int:
        return sum(known.num_bytes for known in self.objects.values())

    def restart(self) -> None:
        """Replay all uses, as a restarted tier does."""
        self.order = Order()
        self.epoch = self.epoch_left = 0
        for number, known in sorted(self.objects.items(), key=lambda item: item[1].used):
            self.order.add_tail(number, self.enter(known.num_bytes))

    def enter(self, num_bytes: int) -> int:
        if self.epoch_left <= 0:
            self.epoch += 1
            self.epoch_left = self.capacity // 8
        self.epoch_left -= num_bytes
        return self.epoch

    def use(self, number: int) -> None:
        self.clock += 1
        self.objects[number].used = self.clock
        self.order.add_tail(number, self.enter(self.objects[number].num_bytes))

    def touch(self, numbers: Sequence[int]) -> None:
        present = [number for number in numbers if number in self.objects]
        for number in present:
            self.clock += 1
            self.objects[number].used = self.clock
        self.order.add_head(present, self.enter(sum(self.objects[number].num_bytes for number in present)))

    def evict_for(self, num_bytes: int) -> None:
        while self.num_bytes + num_bytes > self.capacity:
            self.discard(self.order.victims()[0])

    def store(self, number: int, content: bytes) -> None:
        num_bytes = file_bytes(len(content))
        self.evict_for(num_bytes)
        self.objects[number] = Known(num_bytes, content)
        self.use(number)

    def discard(self, number: int) -> bool:
        self.order.remove(number)
        return self.objects.pop(number, None) is not None
