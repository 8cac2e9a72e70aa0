"""An input of a fuzz target, read as numbers and strings. Any bytes are a valid input."""

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class BytesInput:
    """Reads values from the front of an input. When the input has ended, numbers are 0 and strings empty."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def has_more(self) -> bool:
        return self._position < len(self._data)

    def number(self, num_bytes: int = 1) -> int:
        """Read an unsigned little-endian number of this many bytes."""
        return int.from_bytes(self.take(num_bytes), "little")

    def flag(self) -> bool:
        return bool(self.number() & 1)

    def take(self, num_bytes: int) -> bytes:
        """Read this many bytes, or the rest if fewer are left."""
        part = self._data[self._position : self._position + num_bytes]
        self._position += len(part)
        return part

    def sized(self) -> bytes:
        """Read a length of two bytes, and a string of this length."""
        return self.take(self.number(2))

    def rest(self) -> bytes:
        return self.take(len(self._data))

    def choice(self, values: Sequence[T]) -> T:
        return values[self.number() % len(values)]


class InputRandom(random.Random):
    """A source of random numbers that reads them from an input, so that a fuzzer steers a generator.

    When the input has ended, all numbers are 0.
    """

    def __init__(self, data: bytes) -> None:
        self._input = BytesInput(data)
        super().__init__(0)

    def random(self) -> float:
        return self._input.number(2) / (1 << 16)

    def getrandbits(self, k: int) -> int:
        return self._input.number((k + 7) // 8) & ((1 << k) - 1)

    def seed(self, *_: object, **__: object) -> None:
        """Ignore seeds: the input determines the numbers."""
