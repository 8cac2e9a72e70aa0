"""Hits of an engine of several parts: what all parts have, as far as the scheduler side knows."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_client.core import presence
from lmcache_client.core.hits import NamedRows
from lmcache_client.core.parts import End, Hint
from lmcache_client.core.presence import Presence
from lmcache_store import keys
from lmcache_store.kv_groups import GroupKind, KVGroup, first_needed_chunk
from lmcache_store.tiers.memory.contracts import Slot
from tests.harness.client.parted_rig import PartedRig, known
from tests.harness.client.scheduler_rig import (
    GRID,
    blocks,
    hashes,
    job_ids,
    make_request,
)
from tests.harness.sidecar.wire import NAMESPACE

FULL = KVGroup(0, 32, 4096)
WINDOW = KVGroup(1, 32, 4096, 65, GroupKind.SLIDING_WINDOW)  # reads the chunk before an edge
STATE = KVGroup(2, 32, 1024, 0, GroupKind.STATE)


@pytest.fixture
def rig():
    rig = PartedRig()
    yield rig
    rig.scheduler.go_offline()


@given(
    st.data(),
    st.integers(1, 9),
    st.integers(0, 9),
    st.integers(2, 4),
    st.sampled_from([(FULL,), (FULL, WINDOW, STATE), (WINDOW, STATE), (FULL, STATE)]),
)
def test_joint_hit_is_the_longest_at_which_every_part_can_resume(
    data, num_chunks, at_least, num_parts, groups
):
    rig = PartedRig(*groups, num_parts=num_parts)
    chunk_hashes = GRID.chunk_hashes(hashes(1024), 0, num_chunks)
    names = {group.group: keys.chunk_keys(chunk_hashes, group=group.group) for group in groups}
    flags = st.lists(st.integers(0, 9).map(bool), min_size=num_chunks, max_size=num_chunks)
    residency = [
        {key for row_names in names.values() for key in itertools.compress(row_names, data.draw(flags))}
        for _ in range(num_parts)
    ]
    for key in residency[0]:
        rig.session.rows[key] = slot = Slot(len(rig.session.rows), 1)
        rig.session.committed.append(slot)
    for part, rows in zip(rig.parts, residency[1:], strict=True):
        part.rows = rows

    def can_resume(end):
        firsts = {group.group: max(at_least, first_needed_chunk(group, end, 64)) for group in groups}
        needed = {key for group in groups for key in names[group.group][firsts[group.group] : end]}
        leading = {key for group in groups if group.is_full for key in names[group.group][:end]}
        return needed | leading <= residency[0] and all(needed <= rows for rows in residency[1:])

    rig.arrive(make_request(64 * num_chunks + 8))
    rig.turn()
    hit = rig.lookups.find(rig.scheduler._states["r"].ticket, at_least)
    ends = [end for end in range(at_least + 1, num_chunks + 1) if can_resume(end)]
    assert max(hit.num_chunks, at_least) == max(ends, default=at_least)
    if hit.num_chunks > at_least:
        for group, group_rows in zip(groups, hit.found, strict=True):
            first = max(at_least, first_needed_chunk(group, hit.num_chunks, 64))
            expected = names[group.group][first : hit.num_chunks]
            part = group_rows.part(slice(first, hit.num_chunks))
            assert part.chunk_keys == b"".join(expected)
            assert part.slots() == [rig.session.rows[key] for key in expected]
    rig.scheduler.go_offline()


@pytest.mark.parametrize(
    ("missing", "num_tokens"),
    [((0, 1), 64), ((1, 1), 64), ((1, 0), 128), ((2, 1), 64), ((2, 0), 128), (None, 128)],
)
def test_every_part_can_resume_where_the_load_ends(missing, num_tokens):
    """The load names the rows, so that each part finds its own."""
    rig = PartedRig(FULL, WINDOW, STATE)
    ((part,), groups) = rig.parts, range(3)
    tables = ([1, 2, 3, 4, 5, 6],) * 3
    first = rig.arrive(make_request(192, "first"))
    for end in (64, 128):
        meta = rig.schedule(first, end, tables)
        rig.commit(meta)
    for group in groups:
        for chunk, chunk_hash in enumerate([b"p1", b"p3"]):
            if (group, chunk) != missing:
                part.rows |= set(keys.chunk_keys([chunk_hash], group=group))
    second = rig.arrive(make_request(192, "second"))
    rig.turn()
    assert rig.scheduler.num_loadable(second, 0) == num_tokens
    rig.scheduler.note_allocated("second", tables, num_tokens)
    (load,) = rig.step().loads
    for group in load.groups:
        end = num_tokens // 64
        first_chunk = 0 if group.group == 0 else end - 1
        expected = keys.chunk_keys([b"p1", b"p3"][first_chunk:end], group=group.group)
        assert isinstance(group.found, NamedRows)
        assert (group.found.namespace, group.found.chunk_keys) == (NAMESPACE, b"".join(expected))
        assert [rig.session.rows[key] for key in expected] == group.found.slots()
    rig.scheduler.go_offline()


def test_hit_is_what_all_parts_have():
    rig = PartedRig(num_parts=3)
    rig.stored(3)
    rig.have(3, rig.parts[0])
    rig.have(2, rig.parts[1])
    request = rig.arrive(make_request(200))
    rig.turn()
    assert rig.match(request) == (128, True)
    rig.scheduler.go_offline()


def test_chunks_of_the_engine_itself_need_no_rows_of_other_parts(rig):
    rig.stored(3)
    rig.have(2)
    rig.parts[0].rows -= set(keys.chunk_keys([b"p1"]))
    request = rig.arrive(make_request(200))
    rig.turn()
    assert rig.match(request, computed=64) == (64, True)


def test_rows_without_names_are_never_offered(rig, monkeypatch):
    """Ranks of other parts could not find them, so the load would fail."""
    known(rig)
    request = rig.arrive(make_request(200))
    monkeypatch.setattr(type(rig.lookups), "index", None)  # the client detaches during the lookup
    assert rig.match(request) == (0, False)


def test_unknown_presence_costs_no_call_to_the_sidecar_of_part_0(rig):
    rig.stored(3)
    request = rig.arrive(make_request(200))
    assert rig.match(request) == (None, False)
    assert rig.session.num_hints == 0


def test_answers_become_stale_only_for_rows_that_a_part_lost(rig):
    known(rig)
    rig.have(1)
    late = rig.arrive(make_request(200, "late"))
    rig.turn()
    assert rig.match(late) == (64, True), "the answer shows that the part evicted rows"


def test_stores_that_all_ranks_completed_are_known_everywhere(rig):
    rig.session.memory_only = True
    request = rig.computing()
    meta = rig.step(new=[("r", blocks(7), 0, 200)])
    rig.commit(meta)
    (job,) = meta.stores
    rig.output(stores_ended=Counter({job.job_id: 1}))
    later = rig.arrive(make_request(200, "later"))
    assert rig.match(later) == (None, False), "a rank has not ended its store"
    rig.output(stores_ended=Counter({job.job_id: 1}))
    assert rig.match(later) == (192, True)
    assert rig.finish(request) is False


@pytest.mark.parametrize("is_first", [True, False])
def test_incomplete_store_is_not_known_everywhere(rig, is_first):
    rig.session.memory_only = True
    rig.computing()
    meta = rig.step(new=[("r", blocks(7), 0, 200)])
    rig.commit(meta)
    (job,) = job_ids(meta)
    for is_incomplete in (is_first, not is_first):
        incomplete = {job} if is_incomplete else set()
        rig.output(stores_ended=Counter({job: 1}), incomplete=incomplete)
    later = rig.arrive(make_request(200, "later"))
    assert rig.match(later) == (None, False)
    rig.turn()
    assert rig.match(later) == (0, False)


def test_failed_load_makes_presence_unknown(rig):
    known(rig)
    request = rig.loading()
    rig.output(failed_loads={"r"}, received=["r"])
    rig.have(0)
    rig.finish(request)
    later = rig.arrive(make_request(200, "later"))
    assert rig.match(later) == (None, False)
    rig.turn()
    assert rig.match(later) == (0, False)


def test_presence_is_bounded(monkeypatch):
    monkeypatch.setattr(presence, "MAX_ROWS", 100)
    everywhere = Presence(2)
    words = np.arange(8 * 150, dtype=np.uint64).reshape(150, 8)
    words[:, 0] = 0
    everywhere.add(words[:90])
    everywhere.add(words[:10])
    everywhere.add(words[90:110])
    assert len(everywhere) == 100
    assert everywhere.common([words[:10], words[90:110]]) == 0b10, "the newest ones are retained"
    assert not everywhere.are_everywhere(words[10:20]).any()
    for part in range(1, 2):
        everywhere.take(part, words, np.packbits([True] * 150).tobytes())
    assert len(everywhere) == 100
    everywhere.take(1, words, np.packbits([False] * 150).tobytes())
    assert not everywhere.are_everywhere(words).any()


def test_reset_makes_presence_unknown(rig):
    known(rig)
    rig.scheduler.reset_cache()
    request = rig.arrive(make_request(200))
    namespace = rig.scheduler._namespace
    for key, slot in list(rig.session.rows.items()):
        rig.session.rows[namespace + key] = slot
    assert rig.match(request) == (None, False)
    (hint,) = rig.step().relays
    assert hint.namespace == namespace != NAMESPACE
    assert hint.private_reason


def test_reset_restarts_a_request_that_waits(rig):
    rig.stored(3)
    request = rig.arrive(make_request(200))
    (before,) = rig.step().relays
    rig.scheduler.reset_cache()
    rig.output()
    rig.match(request)  # the request asks again
    rig.drain_lookups()
    assert rig.match(request) == (0, False)
    end, after = rig.step().relays
    assert (end, after.request_id) == (End("r"), "r")
    assert after.number > before.number
    assert after.namespace != before.namespace


def test_preempted_request_asks_again(rig):
    known(rig)
    request = rig.computing(make_request(200, block_hashes=hashes(200, "q")))
    rig.step(new=[("r", blocks(7), 0, 100)])
    assert rig.calls() == [(Hint, "r")] * 0, "the request ended its calls before the hint was relayed"
    rig.step(preempted=["r"])
    rig.stored(3, name="q")
    rig.have(3, name="q")
    assert rig.match(request) == (None, False)
    rig.drain_lookups()
    rig.turn()
    assert rig.match(request) == (192, True)
