"""Local store for payloads of any length, shared by threads; ``test_local_model`` covers random sequences."""

import sys
import threading

import pytest

from lmcache_store.tiers.errors import ArenaError
from lmcache_store.tiers.memory.contracts import Geometry
from lmcache_store.tiers.memory.local import LocalStore
from lmcache_store.tiers.memory.private import PrivateArena
from lmcache_store.tiers.stats import Removal
from testing.stress import Stress

SLOT = 4096
FULL = 16 * SLOT


def key(number: int) -> bytes:
    return bytes(32) + number.to_bytes(32, "big")


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


class Payloads:
    """A store of ``num_bytes`` whose payloads consist of their number."""

    def __init__(self, num_bytes: int = 4 * FULL) -> None:
        self.arena = PrivateArena(Geometry(SLOT, 1), num_bytes // SLOT)
        self.store = LocalStore(self.arena)

    def put(self, number: int, length: int = FULL) -> bool:
        def fill(row: int) -> None:
            self.arena.view(row, 0, length)[:] = bytes([number % 251]) * length

        return self.store.put(key(number), length, fill)

    def get(self, number: int) -> bytes | None:
        with self.store.pin_prefix([key(number)]) as rows:
            return next((bytes(self.arena.view(row, 0, length)) for row, length in rows), None)

    def present(self, *numbers: int) -> list[int]:
        return [number for number in numbers if self.store.prefix([key(number)])]


@pytest.fixture
def payloads():
    return Payloads()


def test_finds_victim_among_many_pinned_chunks():
    payloads = Payloads(16 * FULL)
    for number in range(256):
        payloads.put(number, SLOT)
    with payloads.store.pin_prefix(keys(*range(255))) as rows:
        assert len(rows) == 255
        assert payloads.put(1000, SLOT)
        assert payloads.present(255) == []


def test_full_store_without_eviction_refuses_payloads():
    payloads = Payloads(2 * FULL)
    payloads.store.end_eviction()
    assert [payloads.put(number) for number in range(3)] == [True, True, False]
    assert payloads.put(1, SLOT) is False
    assert payloads.store.keys() == keys(0, 1)
    assert payloads.store.stats.refused == 2


def test_counts_evictions(payloads):
    for number in range(6):
        payloads.put(number)
    assert payloads.store.stats.removed == {Removal.EVICTED: 2}


def test_slow_readers_and_writers_do_not_block_others(payloads):
    payloads.put(1)
    entered, may_leave = threading.Event(), threading.Event()

    def block(row: int) -> None:
        entered.set()
        assert may_leave.wait(60)

    def read() -> None:
        with payloads.store.pin_prefix([key(1)]) as rows:
            block(*rows[0][:1])

    for blocked_call in (read, lambda: payloads.store.put(key(2), SLOT, block)):
        thread = threading.Thread(target=blocked_call)
        thread.start()
        assert entered.wait(60)
        assert payloads.put(3, SLOT)
        assert payloads.get(3) == bytes([3]) * SLOT
        assert payloads.present(2) == []
        may_leave.set()
        thread.join()
        entered.clear()
        may_leave.clear()
    assert payloads.present(2) == [2]


def test_refuses_arena_of_several_columns():
    with pytest.raises(ArenaError, match="one column"):
        LocalStore(PrivateArena(Geometry(SLOT, 2), 16))


def test_eight_threads_read_only_their_payloads():
    stress = Stress()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # switch threads as often as possible
    try:
        stress.run(num_threads=8, seconds=1)
    finally:
        sys.setswitchinterval(interval)
    assert min(stress.counts[action] for action in ("put", "get", "read_prompt", "remove")) > 0


def test_stress_detects_two_rows_in_the_same_slot(monkeypatch):
    """The allocator is patched to give two rows the same slot."""
    stress = Stress()
    allocator = stress.store._rows.allocator
    real = allocator.first_slot
    monkeypatch.setattr(allocator, "first_slot", lambda row: real(row) & ~1)
    with pytest.raises(AssertionError, match=r"bytes of|two writers"):
        stress.run(num_threads=8, seconds=20)
