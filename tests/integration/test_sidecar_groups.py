"""A real sidecar with models whose KV groups need different rows: windows, states, groups without rows."""

from collections.abc import Iterable

import numpy as np
import pytest

from lmcache_client.rpc.session import SidecarSession
from lmcache_store.kv_groups import GroupKind, KVGroup, first_needed_chunk, longest_hit
from lmcache_store.tiers.memory.contracts import LookupResult, Slot
from testing.child_process import wait_until
from testing.processes import RedisProcess, SidecarProcess
from tests.harness.engine import restart_without_memory, session_of
from tests.harness.sidecar.wire import make_keys

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


def store(
    worker: SidecarSession, chunks: range, groups: Iterable[KVGroup] = STORING, request: str = "s"
) -> None:
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


def look_up(
    session: SidecarSession, num_chunks: int, request: str = "r", *, hint: bool = True
) -> LookupResult:
    group_keys = [(group.group, keys_of(group, range(num_chunks))) for group in STORING]
    return session.lookup(request, group_keys, hint=hint)


def find(session: SidecarSession, num_chunks: int) -> tuple[int, dict[tuple[int, int], Slot]]:
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


def assert_hit(session: SidecarSession, num_chunks: int, request: str = "hit") -> None:
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


def until_resident(session: SidecarSession, num_chunks: int, *, of: int | None = None) -> None:
    """Repeat the lookup until a hit of this number of chunks is in memory and nothing is pending."""

    def is_settled() -> bool:
        result = look_up(session, of or num_chunks)
        return result == LookupResult(num_chunks)

    wait_until(is_settled)


@pytest.fixture
def session(sidecar):
    with session_of(sidecar, groups=GROUPS) as session:
        yield session


def test_hit_needs_all_full_attention_rows_and_the_last_window_and_state(sidecar, session):
    store(session, range(8))
    assert look_up(session, 9) == LookupResult(8)
    assert_hit(session, 8)
    assert look_up(session, 8, "leased", hint=False) == LookupResult(8, 8)
    memory = sidecar.stats()["memory"]
    assert (memory["used_rows"], memory["leased_rows"]) == (24, 8 + 2 + 1)


def test_rows_that_survive_a_restart_are_verified_and_hit(sidecar, session):
    store(session, range(8))
    sidecar.settled()
    sidecar.kill()
    sidecar.start()
    with session_of(sidecar, groups=GROUPS) as new_session:
        until_resident(new_session, 8)
        assert_hit(new_session, 8)
        assert sidecar.stats()["memory"]["verified"] == 8 + 2 + 1, "only rows that the hit needs are read"


@pytest.mark.redis
@pytest.mark.parametrize("tier", ["disk", "remote"])
def test_lower_tier_promotes_only_rows_that_a_hit_needs(tmp_path, tier):
    with RedisProcess() as redis:
        options = {"disk_path": tmp_path} if tier == "disk" else {"remote_url": redis.unix_url}
        with SidecarProcess(memory_size="32Mi", **options) as sidecar:
            with session_of(sidecar, groups=GROUPS) as session:
                store(session, range(10))
                store(session, range(10, 12), (FULL, STATE))  # no rows of the window: no hit can end here
            restart_without_memory(sidecar)
            with session_of(sidecar, groups=GROUPS) as session:
                until_resident(session, 10, of=12)
                assert_hit(session, 10)
                assert sidecar.stats()[tier]["promoted"] == 10 + 2 + 1
                assert look_up(session, 4).num_pending == 0
                until_resident(session, 4)
                assert_hit(session, 4)
                assert sidecar.stats()[tier]["promoted"] == 10 + 2 + 1 + 2 + 1
