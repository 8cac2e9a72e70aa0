"""Local store for payloads of any length, shared by threads."""

import threading

import pytest

from lmcache.tiers.errors import ArenaError
from lmcache.tiers.memory.contracts import Geometry
from lmcache.tiers.memory.local import LocalStore
from lmcache.tiers.memory.private import PrivateArena
from lmcache.tiers.stats import Removal

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

    def put(self, number: int, length: int = FULL, *, request=None, byte: int | None = None) -> bool:
        value = number % 251 if byte is None else byte

        def fill(row: int) -> None:
            self.arena.view(row, 0, length)[:] = bytes([value]) * length

        return self.store.put(key(number), length, fill, request=request)

    def read(self, row: int, length: int) -> bytes:
        return bytes(self.arena.view(row, 0, length))

    def get(self, number: int) -> bytes | None:
        return self.store.get(key(number), self.read)

    def present(self, *numbers: int) -> list[int]:
        return [number for number in numbers if self.store.contains(key(number))]


@pytest.fixture
def payloads():
    return Payloads()


@pytest.mark.parametrize("length", [0, 1, SLOT, SLOT + 1, 5 * SLOT, FULL])
def test_get_returns_the_put_payload(payloads, length):
    assert payloads.get(7) is None
    assert payloads.put(7, length)
    assert payloads.get(7) == bytes([7]) * length
    assert payloads.store.num_bytes == max(1, -(-length // SLOT)) * SLOT
    assert (payloads.store.stats.hits, payloads.store.stats.misses) == (1, 1)


def test_refuses_payload_longer_than_a_frame(payloads):
    payloads.put(1, 10)
    assert not payloads.put(1, FULL + 1)
    assert not payloads.put(2, FULL + 1)
    assert payloads.get(1) == bytes([1]) * 10
    assert payloads.store.num_bytes == SLOT


def test_failed_fill_keeps_the_old_payload(payloads):
    payloads.put(1)

    def fail(row: int) -> None:
        raise ValueError("no bytes")

    for number in (1, 2):
        with pytest.raises(ValueError, match="no bytes"):
            payloads.store.put(key(number), FULL, fail)
    assert payloads.get(1) == bytes([1]) * FULL
    assert payloads.present(2) == []
    assert payloads.store.num_bytes == FULL


def test_defect_13_overwriting_and_removing_count_bytes_exactly(payloads):
    for length in (FULL, FULL, SLOT, 3 * SLOT):
        assert payloads.put(1, length)
        assert payloads.store.num_bytes == length
    assert payloads.put(2)
    assert payloads.store.remove(key(1))
    assert not payloads.store.remove(key(1))
    assert payloads.store.num_bytes == FULL
    assert payloads.store.remove(key(2))
    assert payloads.store.num_bytes == 0
    for number in range(20):
        assert payloads.put(number)
    assert payloads.store.num_bytes == payloads.store.capacity_bytes == 4 * FULL


def test_defect_14_evicts_tails_before_heads(payloads):
    for number in range(3):
        payloads.put(number, request="prompt")
    payloads.put(10)
    payloads.put(11)
    assert payloads.present(0, 1, 2) == [0, 1]
    with payloads.store.pin_prefix(keys(0, 1, 2)) as rows:
        assert len(rows) == 2
    payloads.put(12)
    payloads.put(13)
    payloads.put(14)
    assert payloads.store.prefix(keys(0, 1, 2)) == 1


def test_defect_14_head_of_a_too_long_prompt_is_not_evicted():
    payloads = Payloads(2 * FULL)
    assert [payloads.put(number, request="prompt") for number in range(3)] == [True, True, False]
    assert payloads.store.prefix(keys(0, 1, 2)) == 2


def test_defect_15_partial_chunk_uses_only_its_slots():
    payloads = Payloads(2 * FULL)
    for number in range(32):
        assert payloads.put(number, SLOT - 5)
    assert payloads.present(*range(32)) == list(range(32))
    assert payloads.store.num_bytes == 2 * FULL


@pytest.mark.parametrize("num_slots", [1, 15, 16, 17, 40])
def test_defect_15_capacity_matches_the_given_bytes(num_slots):
    payloads = Payloads(num_slots * SLOT)
    for number in range(3 * num_slots):
        assert payloads.put(number, SLOT)
    assert len(payloads.store.keys()) == num_slots
    assert payloads.store.num_bytes == payloads.store.capacity_bytes == num_slots * SLOT
    assert payloads.put(1000, FULL) == (num_slots >= 16)


def test_defect_15_pinned_chunks_survive_between_prefix_and_read(payloads):
    for number in range(4):
        payloads.put(number)
    with payloads.store.pin_prefix(keys(0, 1, 2, 3, 4)) as rows:
        assert not payloads.put(9)
        assert [payloads.read(*row) for row in rows] == [bytes([number]) * FULL for number in range(4)]
    assert payloads.put(9)


def test_payload_stays_readable_after_removal_or_replacement(payloads):
    for is_removed in (True, False):
        payloads.put(1, byte=5)
        with payloads.store.pin_prefix(keys(1)) as rows:
            if is_removed:
                payloads.store.remove(key(1))
            else:
                payloads.put(1, SLOT, byte=6)
            for number in range(50, 60):
                payloads.put(number)
            assert payloads.read(*rows[0]) == bytes([5]) * FULL
        for number in range(50, 54):
            assert payloads.put(number)
        assert payloads.store.num_bytes == 4 * FULL


def test_payload_may_have_several_readers(payloads):
    payloads.put(1)
    with payloads.store.pin_prefix(keys(1)) as first:
        with payloads.store.pin_prefix(keys(1)) as second:
            assert first == second
        for number in range(50, 60):
            payloads.put(number)
        assert payloads.read(*first[0]) == bytes([1]) * FULL


def test_evicts_short_chunks_of_a_frame_for_a_full_chunk():
    payloads = Payloads(2 * FULL)
    for number in range(32):
        payloads.put(number, SLOT)
    assert payloads.put(100)
    assert payloads.get(100) == bytes([100]) * FULL
    assert len(payloads.present(*range(32))) == 16


def test_evicts_the_smallest_sufficient_set_of_neighbours():
    payloads = Payloads(FULL)
    payloads.put(0, 8 * SLOT)
    for number in range(1, 9):
        payloads.put(number, SLOT)
    payloads.get(0)
    assert payloads.put(10, 4 * SLOT)
    assert payloads.present(*range(9)) == [0, 5, 6, 7, 8]


def test_frame_with_a_pinned_chunk_is_not_evicted():
    payloads = Payloads(2 * FULL)
    for number in range(32):
        payloads.put(number, SLOT)
    with payloads.store.pin_prefix(keys(3)), payloads.store.pin_prefix(keys(20)):
        assert not payloads.put(100)
        assert payloads.present(*range(32)) == list(range(32))
    assert payloads.put(100)


def test_finds_victim_among_many_pinned_chunks():
    payloads = Payloads(16 * FULL)
    for number in range(256):
        payloads.put(number, SLOT)
    with payloads.store.pin_prefix(keys(*range(255))) as rows:
        assert len(rows) == 255
        assert payloads.put(1000, SLOT)
        assert payloads.present(255) == []


def test_keys_are_listed_in_eviction_order(payloads):
    payloads.put(1)
    for number in (2, 3, 4):
        payloads.put(number, request="prompt")
    payloads.get(2)
    assert payloads.store.keys() == keys(1, 4, 3, 2)
    with payloads.store.pin_prefix(keys(1)):
        assert payloads.store.keys() == keys(4, 3, 2, 1)
    for number, remaining in enumerate(([1, 2, 3], [1, 2], [1], [])):
        payloads.put(100 + number)
        assert payloads.present(1, 2, 3) == remaining


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

    def block(row: int, length: int = 0) -> None:
        entered.set()
        assert may_leave.wait(60)

    for blocked_call in (
        lambda: payloads.store.get(key(1), block),
        lambda: payloads.store.put(key(2), SLOT, block),
    ):
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


def test_shrinks_to_the_new_size_and_grows_again(payloads):
    for number in range(4):
        payloads.put(number)
    with payloads.store.pin_prefix(keys(3)) as rows:
        assert payloads.store.resize(2 * FULL + SLOT).blocked == {"leased": 1}
        assert payloads.store.capacity_bytes == 2 * FULL
        assert payloads.present(3) == []
        assert payloads.read(*rows[0]) == bytes([3]) * FULL
    assert payloads.store.resize(2 * FULL) == (1, {})
    payloads.arena.discard(payloads.store.capacity_bytes // SLOT)
    for number in range(10, 20):
        assert payloads.put(number)
    assert payloads.store.num_bytes == 2 * FULL
    payloads.store.resize(100 * FULL)
    for number in range(10, 20):
        assert payloads.put(number)
        assert payloads.get(number) == bytes([number]) * FULL
    assert payloads.store.num_bytes == payloads.store.capacity_bytes == 4 * FULL


def test_refuses_arena_of_several_columns():
    with pytest.raises(ArenaError, match="one column"):
        LocalStore(PrivateArena(Geometry(SLOT, 2), 16))
