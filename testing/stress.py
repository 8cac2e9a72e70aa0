"""Threads that put, read, pin and remove in one ``LocalStore``, and compare every byte."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

import numpy as np

from lmcache_store.tiers.memory.contracts import Geometry
from lmcache_store.tiers.memory.local import LocalStore
from lmcache_store.tiers.memory.private import PrivateArena

SLOT_BYTES = 4096
NUM_KEYS = 96
PROMPT = 8  # keys of one prompt


class Stress:
    """A store that is smaller than the data put into it. A payload repeats one 64-bit number, its key and
    version, so that bytes of another row or of two writers are detected."""

    def __init__(self, num_slots: int = 20 * 16) -> None:
        self.arena = PrivateArena(Geometry(SLOT_BYTES, 1), num_slots)
        self.store = LocalStore(self.arena)
        self.counts: Counter[str] = Counter()
        self._counts_by_thread: list[Counter[str]] = []
        self.errors: list[BaseException] = []  # the first error ends the run
        self.num_compared = 0  # number of payloads, approximate: threads share the counter
        self._words = np.frombuffer(self.arena.buffer, np.uint64)

    def run(self, num_threads: int, seconds: float) -> None:
        """Run until the time is up or an error occurred. Raises the first error."""
        end = time.monotonic() + seconds
        threads = [threading.Thread(target=self._work, args=(seed, end)) for seed in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for counts in self._counts_by_thread:  # an addition in several threads at once would lose counts
            self.counts += counts
        if not self.errors:
            self.check_account()
        for error in self.errors:
            raise error

    def check_account(self) -> None:
        """Check the idle store: its used bytes equal those of its rows."""
        keys, lengths = self.store.keys(), []
        for key in keys:
            with self.store.pin_prefix([key]) as rows:
                lengths += [length for _, length in rows]
        expected = sum(-(-length // SLOT_BYTES) * SLOT_BYTES for length in lengths)
        if self.store.num_bytes != expected:
            self.errors.append(AssertionError(f"{self.store.num_bytes} bytes are used, expected {expected}"))
        for number in range(NUM_KEYS):
            self.store.remove(_key(number))
        assert self.store.num_bytes == 0

    def _work(self, seed: int, end: float) -> None:
        rng = random.Random(seed)
        actions = [self._put] * 6 + [self._get] * 6 + [self._read_prompt] * 3 + [self._remove]
        counts: Counter[str] = Counter()
        try:
            while time.monotonic() < end and not self.errors:
                action = rng.choice(actions)
                counts[action.__name__[1:]] += bool(action(rng))
        except BaseException as error:
            self.errors.append(error)
        self._counts_by_thread.append(counts)

    def _put(self, rng: random.Random) -> bool:
        number, length = rng.randrange(NUM_KEYS), 8 * rng.randint(1, 16 * SLOT_BYTES // 8)
        value = number << 32 | rng.getrandbits(32)

        def fill(row: int) -> None:
            words = self._payload(row, length)
            words[:] = value
            if rng.random() < 0.05:
                raise InterruptedError
            assert (words == value).all(), "two writers"

        try:
            return self.store.put(_key(number), length, fill, request=number // PROMPT)
        except InterruptedError:
            return False

    def _get(self, rng: random.Random) -> bool:
        number = rng.randrange(NUM_KEYS)
        with self.store.pin_prefix([_key(number)]) as rows:
            return any(self._check(number, row, length) for row, length in rows)

    def _read_prompt(self, rng: random.Random) -> bool:
        first = rng.randrange(0, NUM_KEYS, PROMPT)
        keys = [_key(number) for number in range(first, first + PROMPT)]
        with self.store.pin_prefix(keys, first // PROMPT) as rows:
            for _ in range(2):
                for number, (row, length) in enumerate(rows, first):
                    self._check(number, row, length)
        return bool(rows)

    def _remove(self, rng: random.Random) -> bool:
        return self.store.remove(_key(rng.randrange(NUM_KEYS)))

    def _check(self, number: int, row: int, length: int) -> bool:
        words = self._payload(row, length)
        value = int(words[0])
        self.num_compared += 1
        assert value >> 32 == number, f"bytes of key {value >> 32} under key {number}"
        assert (words == value).all(), f"key {number} has bytes of two writers"
        return True

    def _payload(self, row: int, length: int) -> np.ndarray:
        return self._words[row * SLOT_BYTES // 8 :][: length // 8]


def _key(number: int) -> bytes:
    return number.to_bytes(64, "big")
