"""An engine with several KV groups and a real sidecar: rows of random bytes, read back like a hit."""

from collections.abc import Iterable

import numpy as np

from lmcache.kv_groups import GroupKind, KVGroup, first_needed_chunk, longest_hit
from lmcache.rpc.session import Session
from lmcache.tiers.memory.contracts import LookupResult, Slot
from testing.child_process import wait_until
from tests.harness.wire import make_keys

CHUNK_TOKENS = 256
FULL = KVGroup(0, 16, 100_000)
WINDOW = KVGroup(1, 16, 60_000, 300, GroupKind.SLIDING_WINDOW)  # a hit needs its last two chunks
CHUNKED = KVGroup(2, 16, 0, 256, GroupKind.CHUNKED_ATTENTION)  # stores no rows
STATE = KVGroup(3, 256, 9_000, 0, GroupKind.STATE)
GROUPS = (FULL, WINDOW, CHUNKED, STATE)
STORING = (FULL, WINDOW, STATE)


def keys_of(group: KVGroup, chunks: Iterable[int]) -> bytes:
    return make_keys(*(1000 * group.group + chunk for chunk in chunks))


def payload(group: KVGroup, chunk: int) -> np.ndarray:
    draw = np.random.default_rng(1000 * group.group + chunk)
    return draw.integers(0, 256, group.chunk_bytes, dtype=np.uint8)


def store(worker: Session, chunks: range, groups: Iterable[KVGroup] = STORING, request: str = "s") -> None:
    """Reserve the chunks of every group, and commit all of them at once, as an engine does."""
    with worker.copying():
        slots = []
        for group in groups:
            keys = keys_of(group, chunks)
            answers = worker.reserve(group.group, keys, request_id=request, first_chunk=chunks.start)
            for chunk, answer in zip(chunks, answers, strict=True):
                if answer.slot is not None:
                    worker.view(answer.slot.row, group.chunk_bytes)[:] = payload(group, chunk)
                    slots.append(answer.slot)
        worker.commit(slots)


def look_up(session: Session, num_chunks: int, request: str = "r", *, hint: bool = True) -> LookupResult:
    group_keys = [(group.group, keys_of(group, range(num_chunks))) for group in STORING]
    return session.lookup(request, group_keys, hint=hint)


def find(session: Session, num_chunks: int) -> tuple[int, dict[tuple[int, int], Slot]]:
    """The longest hit according to the index, and the slots of its rows by group and chunk."""
    present, slots = [], {}
    for group in STORING:
        words = np.frombuffer(keys_of(group, range(num_chunks)), "<u8").reshape(-1, 8)
        located = session.index.find_each(words)
        present.append(located.is_there.tobytes())
        rows = map(Slot, located.rows.tolist(), located.generations.tolist())
        slots |= {(group.group, chunk): slot for chunk, slot in enumerate(rows) if located.is_there[chunk]}
    end = longest_hit(STORING, CHUNK_TOKENS, present, 0, num_chunks)
    return end, {(group, chunk): slot for group, chunk, slot in _needed(end, slots)}


def _needed(end: int, slots: dict[tuple[int, int], Slot]) -> Iterable[tuple[int, int, Slot]]:
    for group in STORING:
        for chunk in range(first_needed_chunk(group, end, CHUNK_TOKENS), end):
            yield group.group, chunk, slots[group.group, chunk]


def assert_hit(session: Session, num_chunks: int, request: str = "hit") -> None:
    """Lease a hit of this number of chunks, and compare all rows that it needs."""
    result = look_up(session, num_chunks, request, hint=False)
    assert result.num_leased == num_chunks
    end, slots = find(session, num_chunks)
    assert end == num_chunks
    by_number = {group.group: group for group in STORING}
    with session.copying():
        for (group, chunk), slot in slots.items():
            content = session.view(slot.row, by_number[group].chunk_bytes)
            assert np.array_equal(content, payload(by_number[group], chunk)), (group, chunk)
            assert session.holds(slot)
    session.release([request])


def until_resident(session: Session, num_chunks: int, *, of: int | None = None) -> None:
    """Repeat the lookup until a hit of this number of chunks is in memory and nothing is pending."""

    def is_settled() -> bool:
        result = look_up(session, of or num_chunks)
        return result == LookupResult(num_chunks)

    wait_until(is_settled)
