"""Lookups, loads and stores of whole pages, with a real sidecar: bytes, leases and counts."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest

from testing.processes import SidecarProcess
from tests.harness import blocking
from tests.harness.blocking import (
    PAGE_TOKENS,
    PATIENT,
    Gate,
    PageEngine,
    Started,
    hashes_of,
    patient_calls,
    wait_leased,
    wait_released,
)

__all__ = ["patient_calls"]

pytestmark = pytest.mark.usefixtures("patient_calls")

SMALL = "1Mi"
"""A memory tier of 62 rows."""


@pytest.fixture(scope="module")
def shared_sidecar():
    with SidecarProcess(memory_size=SMALL) as process:
        yield process


@pytest.fixture
def sidecar(shared_sidecar, monkeypatch):
    """A sidecar in whose namespace nothing is stored. It has rows of other tests."""
    shared_sidecar.wait_until(lambda stats: not stats["clients"])
    monkeypatch.setattr(blocking, "NAMESPACE", os.urandom(32))
    return shared_sidecar


@pytest.fixture
def fresh_sidecar():
    with SidecarProcess(memory_size=SMALL) as process:
        yield process


@pytest.fixture(params=[1, 2], ids=["one group", "two groups"])
def engine(request, sidecar):
    with PageEngine(sidecar, num_groups=request.param) as engine:
        yield engine


def test_pages_come_back_as_they_were_stored(engine):
    assert engine.look_up(1, 2, 3) == 0
    assert engine.store(1, 2, 3)
    assert engine.store(4, 5, prefix=[1, 2, 3])
    assert engine.run(1, 2, 3, 4, 5, 6) == 5
    assert engine.run(4, 5) == 2
    assert engine.store(1, 2, 3), "pages that are cached already"
    wait_released(engine.sidecar)


def test_only_leading_pages_are_found_and_loaded(engine):
    engine.store(1, 2)
    engine.store(4)
    assert engine.look_up(1, 2, 3, 4) == 2
    assert engine.load(1, 2, 3, 4) == 2
    assert engine.look_up(3, 4) == 0
    assert engine.load(3, 4) == 0
    assert engine.look_up() == 0
    assert engine.load() == 0
    assert not engine.access.store(0, [], [])


def test_page_without_the_rows_of_one_group_is_not_found(sidecar):
    with PageEngine(sidecar, num_groups=2) as engine:
        engine.store(1, 2)
        engine.store(3, groups=[0])
        engine.store(4, groups=[1])
        assert engine.look_up(1, 2, 3) == 2
        assert engine.look_up(4) == 0
        assert engine.load(3, group=0) == 1
        assert engine.load(3, group=1) == 0


def test_engine_with_another_namespace_finds_nothing(sidecar, engine):
    engine.store(1)
    other_namespace = os.urandom(32)
    with PageEngine(
        sidecar, num_groups=engine.num_groups, engine_uuid=b"o" * 16, namespace=other_namespace
    ) as other:
        other.weights = 1
        assert other.look_up(1) == 0
        assert other.load(1) == 0
        other.store(1)
        assert other.run(1) == 1
    assert engine.run(1) == 1


def test_another_engine_finds_the_same_pages(sidecar, engine):
    engine.store(1, 2)
    with PageEngine(sidecar, num_groups=engine.num_groups, engine_uuid=b"o" * 16) as other:
        assert other.run(1, 2, 3) == 2


def test_several_threads_share_a_load(sidecar):
    with PageEngine(sidecar, num_threads=3) as engine:
        engine.store(*range(20))
        assert engine.run(*range(20)) == 20


class TestLeases:
    def test_rows_are_leased_from_the_lookup_to_the_last_load(self, engine):
        engine.store(1, 2, 3)
        assert engine.look_up(1, 2, 3) == 3
        wait_leased(engine.sidecar, 3 * engine.num_groups)
        for group in range(engine.num_groups):
            assert engine.load(1, group=group) == 1
        engine.settle()
        wait_leased(engine.sidecar, 3 * engine.num_groups)
        for group in range(engine.num_groups):
            wait_leased(engine.sidecar, 3 * engine.num_groups)
            assert engine.load(2, 3, group=group) == 2
        wait_released(engine.sidecar)

    def test_lookup_that_finds_nothing_leases_nothing(self, engine):
        engine.store(2)
        assert engine.look_up(1, 2) == 0
        engine.settle()
        wait_released(engine.sidecar)

    def test_leased_rows_survive_eviction(self, engine):
        engine.store(1, 2, 3)
        assert engine.look_up(1, 2, 3) == 3
        engine.store(7, 8)
        engine.evict()
        assert engine.look_up(7, 8) == 0
        for group in range(engine.num_groups):
            assert engine.load(1, 2, 3, group=group) == 3
        wait_released(engine.sidecar)
        engine.evict()
        assert engine.look_up(1, 2, 3) == 0

    def test_partial_load_ends_the_lease(self, engine):
        engine.store(1, 2, 3)
        assert engine.look_up(1, 2, 3) == 3
        assert engine.load(1, 2, 9) == 2
        wait_released(engine.sidecar)

    def test_lookups_of_the_same_pages_are_loaded_in_their_order(self, sidecar):
        with PageEngine(sidecar) as engine:
            engine.store(1, 2, 3, 4)
            assert engine.look_up(1, 2) == 2
            assert engine.look_up(1, 2, 3, 4) == 4
            assert engine.load(1, 2) == 2
            engine.settle()
            wait_leased(sidecar, 4)
            engine.evict()
            assert engine.load(1, 2) == 2
            engine.settle()
            wait_leased(sidecar, 4)
            assert engine.load(3, 4) == 2
            wait_released(sidecar)

    def test_load_without_a_lookup_leaves_no_lease(self, engine):
        engine.store(1, 2)
        for group in range(engine.num_groups):
            assert engine.load(1, 2, 3, group=group) == 2
            assert engine.load(9, group=group) == 0
        for group in range(engine.num_groups):
            assert engine.load(1, 2, group=group) == 2
        engine.settle()
        wait_released(engine.sidecar)
        assert not len(engine.access._requests)

    def test_lookup_without_a_load_ends_after_the_limit(self, sidecar):
        with PageEngine(sidecar, dataclasses.replace(PATIENT, lease_seconds=0.05)) as engine:
            engine.store(1, 2, 3)
            assert engine.look_up(1, 2, 3) == 3
            wait_released(sidecar)
            assert engine.load(1, 2, 3) == 3, "rows that are still in memory"
            wait_released(sidecar)

    def test_dropped_lookups_end_while_others_go_on(self, sidecar):
        with PageEngine(sidecar, dataclasses.replace(PATIENT, lease_seconds=0.05)) as engine:
            engine.store(1, 2, 3)
            assert engine.look_up(1, 2, 3) == 3

            def is_released():
                for _ in range(10):
                    engine.look_up(9)
                return not sidecar.stats()["memory"]["leased_rows"]

            blocking.wait_for(is_released)

    def test_load_that_outlives_the_lease_leaves_no_lease(self, sidecar):
        """The lease expires during the load, which then looks the rest of the pages up."""
        with PageEngine(sidecar, dataclasses.replace(PATIENT, lease_seconds=0.05)) as engine:
            engine.store(1, 2, 3)
            gate = engine.copier.before_load = Gate()
            assert engine.look_up(1, 2, 3) == 3
            load = Started(lambda: engine.load(1, 2, 3, 9))
            gate.wait()
            wait_released(sidecar)
            gate.open()
            assert load.result() == 3
            engine.settle()
            wait_released(sidecar)

    def test_all_leases_end_with_the_access(self, sidecar):
        with PageEngine(sidecar) as engine:
            engine.store(1, 2)
            assert engine.look_up(1, 2) == 2
            wait_leased(sidecar, 2)
            engine.access.close()
            assert engine.look_up(1, 2) == 0
            assert engine.load(1, 2) == 0
            assert not engine.store(3)
            assert not engine.access.is_attached
            wait_released(sidecar)
            engine.access.close()


class TestEvictionDuringALoad:
    @pytest.mark.parametrize("num_threads", [1, 3])
    def test_row_that_is_reused_during_its_copy_is_not_delivered(self, sidecar, num_threads):
        """No lease protects the rows: the load runs without a lookup, and finds them in the index."""
        with (
            PageEngine(sidecar, num_threads=num_threads) as engine,
            PageEngine(sidecar, engine_uuid=b"o" * 16) as other,
        ):
            engine.store(1, 2, 3)
            gate = engine.copier.before_load = Gate()
            load = Started(lambda: engine.load(1, 2, 3))
            gate.wait()
            other.evict()
            gate.open()
            assert load.result() == 0
            engine.settle()
            wait_released(sidecar)

    def test_row_that_is_reused_after_its_copy_is_not_delivered(self, sidecar):
        with PageEngine(sidecar) as engine, PageEngine(sidecar, engine_uuid=b"o" * 16) as other:
            engine.store(1, 2, 3)
            engine.copier.after_load = lambda: other.evict() if engine.copier.num_loads == 2 else None
            assert engine.load(1, 2, 3) == 1

    def test_row_that_is_reused_before_its_copy_is_not_copied(self, sidecar):
        with PageEngine(sidecar) as engine, PageEngine(sidecar, engine_uuid=b"o" * 16) as other:
            engine.store(1, 2, 3)
            assert other.look_up(1) == 1, "a lease of the first page only"
            engine.copier.after_load = lambda: other.evict() if engine.copier.num_loads == 1 else None
            assert engine.load(1, 2, 3) == 1
            assert engine.copier.num_loads == 1

    def test_pages_evicted_between_lookup_and_load_are_not_loaded(self, sidecar):
        limits = dataclasses.replace(PATIENT, lease_seconds=0.05)
        with PageEngine(sidecar, limits) as engine, PageEngine(sidecar, engine_uuid=b"o" * 16) as other:
            engine.store(1, 2, 3)
            assert engine.look_up(1, 2, 3) == 3
            wait_released(sidecar)
            other.evict()
            engine.store(1)
            assert engine.load(1, 2, 3) == 1
            wait_released(sidecar)


class TestStores:
    def test_store_fails_while_all_rows_are_in_use(self, sidecar):
        with PageEngine(sidecar) as engine:
            num_rows = sidecar.stats()["memory"]["usable_rows"]
            session = engine.client.session
            assert session is not None
            reserved = session.reserve(0, b"".join(b"r" * 32 + page for page in hashes_of(range(num_rows))))
            slots = [reservation.slot for reservation in reserved]
            assert not engine.store(1)
            assert engine.look_up(1) == 0
            session.abort(slots)
            assert engine.store(1)

    def test_pages_that_follow_each_other_are_evicted_from_the_end(self, fresh_sidecar):
        """Stores of one prompt in several calls count as one chain."""
        with PageEngine(fresh_sidecar) as engine:
            engine.store(1, 2)
            engine.store(3, 4, prefix=[1, 2])
            # A row can't be evicted before the sidecar has its checksum.
            stats = fresh_sidecar.wait_until(lambda stats: None if stats["num_unwritten_rows"] else stats)
            num_rows = stats["memory"]["usable_rows"]
            for number in range(100, 100 + num_rows - 2):  # evicts two rows
                engine.store(number)
            assert engine.look_up(1, 2, 3, 4) == 2

    def test_failed_copy_is_not_found(self, sidecar, caplog):
        with PageEngine(sidecar) as engine:

            def fail():
                raise OSError("no memory")

            engine.copier.before_store = fail
            assert not engine.store(1, 2)
            engine.copier.before_store = blocking.nothing
            assert "A store failed; later stores go on" in caplog.text
            assert engine.look_up(1, 2) == 0
            assert engine.store(1, 2)
            assert engine.run(1, 2) == 2

    def test_failed_copy_of_a_load_delivers_the_pages_before_it(self, sidecar, caplog):
        with PageEngine(sidecar) as engine:
            engine.store(1, 2, 3)

            def fail():
                if engine.copier.num_loads == 2:
                    raise OSError("no memory")

            engine.copier.before_load = fail
            assert engine.run(1, 2, 3) == 1
            assert "A load failed; later loads go on" in caplog.text
            assert engine.run(1, 2, 3) == 3
            wait_released(sidecar)

    def test_pages_outside_the_engines_memory_are_refused(self, engine):
        assert not engine.access.store(0, hashes_of([1]), [blocking.NUM_PAGES])
        assert engine.look_up(1) == 0
        engine.store(1)
        for group in range(engine.num_groups):
            assert engine.access.load(group, hashes_of([1]), [blocking.NUM_PAGES]) == 0


class TestNamespaces:
    def test_no_page_of_another_namespace_is_found(self, engine):
        engine.store(1, 2)
        engine.access.set_namespace(os.urandom(32))
        assert engine.look_up(1, 2) == 0
        assert engine.load(1, 2) == 0
        engine.weights = 1
        engine.store(1)
        assert engine.run(1, 2) == 1
        engine.access.set_namespace(blocking.NAMESPACE)
        engine.weights = 0
        assert engine.run(1, 2) == 2
        wait_released(engine.sidecar)

    def test_without_a_namespace_nothing_is_found_or_stored(self, engine):
        engine.store(1)
        assert engine.look_up(1) == 1
        engine.access.set_namespace(None)
        assert engine.look_up(1) == 0
        assert engine.load(1) == 0
        assert not engine.store(2)
        wait_released(engine.sidecar)
        engine.access.set_namespace(blocking.NAMESPACE)
        assert engine.run(1) == 1
        assert engine.look_up(2) == 0

    def test_lookup_before_a_change_is_not_loaded_after_it(self, engine):
        engine.store(1, 2)
        assert engine.look_up(1, 2) == 2
        engine.access.set_namespace(os.urandom(32))
        wait_released(engine.sidecar)
        assert engine.load(1, 2) == 0

    @pytest.mark.parametrize("namespace", [None, os.urandom(32)], ids=["none", "another"])
    @pytest.mark.parametrize("hook", ["before_load", "after_load"])
    def test_load_that_runs_during_a_change_delivers_nothing(self, sidecar, namespace, hook):
        with PageEngine(sidecar) as engine:
            engine.store(1, 2)
            assert engine.look_up(1, 2) == 2
            gate = Gate()
            setattr(engine.copier, hook, gate)
            load = Started(lambda: engine.load(1, 2))
            gate.wait()
            engine.access.set_namespace(namespace)
            gate.open()
            assert load.result() == 0
            engine.settle()
            wait_released(sidecar)

    def test_load_that_looks_up_during_a_change_leaves_no_lease(self, sidecar, monkeypatch):
        with PageEngine(sidecar) as engine:
            engine.store(1, 2)
            assert engine.look_up(1, 2) == 2
            session = engine.client.session
            gate, lookup = Gate(), session.lookup

            def late(request_id, group_keys, **options):
                if not options.get("hint"):
                    gate()
                return lookup(request_id, group_keys, **options)

            monkeypatch.setattr(session, "lookup", late)
            load = Started(lambda: engine.load(1, 2, 3))
            gate.wait()
            engine.access.set_namespace(None)
            engine.settle()
            gate.open()
            assert load.result() == 0
            engine.settle()
            wait_released(sidecar)

    def test_lookup_that_runs_during_a_change_finds_nothing(self, sidecar, monkeypatch):
        with PageEngine(sidecar) as engine:
            engine.store(1, 2)
            session = engine.client.session
            gate, lookup = Gate(), session.lookup

            def late(request_id, group_keys, **options):
                result = lookup(request_id, group_keys, **options)
                if not options.get("hint"):
                    gate()
                return result

            monkeypatch.setattr(session, "lookup", late)
            looked_up = Started(lambda: engine.look_up(1, 2))
            gate.wait()
            engine.access.set_namespace(os.urandom(32))
            gate.open()
            assert looked_up.result() == 0
            engine.settle()
            wait_released(sidecar)

    @pytest.mark.parametrize("hook", ["before_store", "after_store"])
    def test_store_that_runs_during_a_change_ends_under_its_old_name(self, sidecar, hook):
        with PageEngine(sidecar) as engine:
            gate = Gate()
            setattr(engine.copier, hook, gate)
            store = Started(lambda: engine.store(1, 2))
            gate.wait()
            engine.access.set_namespace(os.urandom(32))
            gate.open()
            assert store.result()
            assert engine.look_up(1, 2) == 0
            engine.access.set_namespace(blocking.NAMESPACE)
            assert engine.run(1, 2) == 2


class TestWindows:
    """The second KV group has a sliding window of two pages."""

    @pytest.mark.parametrize(
        ("stored", "hits", "ends"),
        [
            ([0, 1, 2, 3, 4, 5], 6, [1, 2, 3, 4, 5, 6]),
            ([0, 1, 3, 4], 5, [1, 2, 5]),
            ([2, 3], 4, [4]),
            ([5], 0, []),
            ([0], 1, [1]),
            ([], 0, []),
        ],
    )
    def test_hit_ends_where_the_window_is_complete(self, sidecar, stored, hits, ends):
        with PageEngine(sidecar, num_groups=2, window_pages=2) as engine:
            engine.store(*range(6), groups=[0])
            for number in stored:
                engine.store(number, groups=[1])
            assert engine.look_up(*range(6)) == hits
            assert engine.access.ends(hashes_of(range(6)), hits) == ends
            if hits:
                assert engine.load(*range(hits), group=0) == hits
                window = range(max(0, hits - 2), hits)
                assert engine.load(*window, group=1) == len(window)
            engine.settle()
            wait_released(sidecar)

    def test_ends_without_a_window(self, engine):
        engine.store(1, 2, 3)
        assert engine.access.ends(hashes_of([1, 2, 3]), 3) == [1, 2, 3]
        assert engine.access.ends([], 0) == []
        engine.access.set_namespace(None)
        assert engine.access.ends(hashes_of([1, 2, 3]), 3) == [3]


class TestColumns:
    def test_page_is_found_when_all_ranks_have_stored_it(self, sidecar):
        with (
            PageEngine(sidecar, column=0, num_columns=2) as first,
            PageEngine(sidecar, column=1, num_columns=2) as second,
        ):
            assert first.store(1, 2)
            assert second.store(1)
            for rank in (first, second):
                assert rank.look_up(1, 2) == 1
            for rank in (first, second):
                assert rank.load(1) == 1
                rank.settle()
            wait_released(sidecar)

    def test_lease_of_one_rank_does_not_end_with_that_of_the_other(self, sidecar):
        with (
            PageEngine(sidecar, column=0, num_columns=2) as first,
            PageEngine(sidecar, column=1, num_columns=2) as second,
        ):
            for rank in (first, second):
                rank.store(1, 2)
            for rank in (first, second):
                assert rank.look_up(1, 2) == 2
            assert first.load(1, 2) == 2
            first.settle()
            wait_leased(sidecar, 2)
            assert second.load(1, 2) == 2
            wait_released(sidecar)


class TestReports:
    @pytest.mark.parametrize("num_groups", [1, 2])
    def test_counts_are_right_to_the_token(self, fresh_sidecar, num_groups):
        """The first prompt is new, the second has a page more and a tail, the third is in the engine."""
        page = PAGE_TOKENS
        with PageEngine(fresh_sidecar, num_groups=num_groups) as engine:
            engine.report(1, 2, 3, num_engine=0, num_loaded=0)
            engine.store(1, 2, 3)
            assert engine.run(1, 2, 3, 4) == 3
            engine.report(1, 2, 3, 4, num_engine=0, num_loaded=3, num_more_tokens=5)
            assert engine.run(3) == 1
            engine.report(1, 2, 3, num_engine=2, num_loaded=1)
            stats = fresh_sidecar.wait_until(
                lambda stats: stats if stats["causes"]["prompt_tokens"] == 10 * page + 5 else None
            )
            causes = {"new": 4 * page, "memory": 4 * page, "engine": 2 * page, "tail": 5}
            assert stats["causes"]["cause_tokens"] == causes
            lookups = stats["lookups"]
            assert (lookups["num_lookups"], lookups["lookup_tokens"]) == (3, 10 * page)
            assert lookups["hit_tokens"] == {"engine": 2 * page, "memory": 4 * page}
            assert lookups["loaded_tokens"] == {"memory": 4 * page}

    def test_pages_that_were_evicted_are_counted_as_such(self, fresh_sidecar):
        with PageEngine(fresh_sidecar) as engine:
            engine.report(1, 2, 3, num_engine=0, num_loaded=0)
            engine.store(1, 2, 3)
            engine.evict()
            assert engine.run(1, 2, 3) == 0
            engine.report(1, 2, 3, num_engine=0, num_loaded=0)
            fresh_sidecar.wait_until(
                lambda stats: (
                    stats["causes"]["cause_tokens"] == {"new": 3 * PAGE_TOKENS, "evicted": 3 * PAGE_TOKENS}
                )
            )

    def test_lookups_and_loads_alone_count_no_request(self, fresh_sidecar):
        with PageEngine(fresh_sidecar) as engine:
            engine.store(1)
            assert engine.run(1, 2) == 1
            engine.settle()
            stats = fresh_sidecar.stats()
            assert (stats["lookups"]["num_lookups"], stats["causes"]["prompt_tokens"]) == (0, 0)

    def test_times_of_a_requests_lookups_and_loads_are_reported_once(self, fresh_sidecar):
        with PageEngine(fresh_sidecar) as engine:
            engine.store(1, 2, 3)
            assert engine.run(1, 2) == 2
            assert engine.run(3) == 1
            engine.settle()
            for _ in range(2):
                engine.report(1, 2, 3, num_engine=0, num_loaded=3)

            def times():
                requests = json.loads(fresh_sidecar.get("/requests"))["requests"]
                is_timed = len(requests) == 2 and all(r["load_seconds"] is not None for r in requests)
                return requests if is_timed else None

            second, first = blocking.wait_for(times)
            assert first["lookup_seconds"] > 0
            assert first["load_seconds"]["memory"] > 0
            assert second["lookup_seconds"] == 0
            assert second["load_seconds"]["memory"] == 0

    def test_no_request_is_reported_without_a_namespace(self, fresh_sidecar):
        with PageEngine(fresh_sidecar) as engine:
            engine.access.set_namespace(None)
            engine.report(1, num_engine=0, num_loaded=0)
            engine.access.set_namespace(blocking.NAMESPACE)
            engine.report(1, num_engine=0, num_loaded=0)
            fresh_sidecar.wait_until(lambda stats: stats["lookups"]["num_lookups"] == 1)

    def test_report_that_fails_does_not_stop_later_ones(self, fresh_sidecar, caplog):
        with PageEngine(fresh_sidecar) as engine:

            def fail():
                raise ValueError("no hashes")

            engine.access.report(blocking.EngineRequest(fail, 10, 0, 0))
            engine.report(1, num_engine=0, num_loaded=0)
            fresh_sidecar.wait_until(lambda stats: stats["causes"]["prompt_tokens"] == PAGE_TOKENS)
            assert "Releasing or reporting a lookup failed" in caplog.text
