"""Names, windows, columns and reports of whole pages, with a real sidecar."""

from __future__ import annotations

import json
import os

import pytest

from lmcache.engines.core import blocking as core_blocking
from tests.harness import blocking
from tests.harness.blocking import (
    PAGE_TOKENS,
    Gate,
    PageEngine,
    Started,
    hashes_of,
    patient_calls,
    wait_leased,
    wait_released,
)
from tests.harness.blocking_fixtures import engine, fresh_sidecar, shared_sidecar, sidecar

__all__ = ["engine", "fresh_sidecar", "patient_calls", "shared_sidecar", "sidecar"]

pytestmark = pytest.mark.usefixtures("patient_calls")


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

    def test_old_reports_are_dropped(self, fresh_sidecar, monkeypatch):
        with PageEngine(fresh_sidecar) as engine:
            with monkeypatch.context() as patch:
                patch.setattr(core_blocking, "_REPORT_SECONDS", 0.0)
                engine.report(1, 2, num_engine=0, num_loaded=0)
            engine.report(1, num_engine=0, num_loaded=0)
            stats = fresh_sidecar.wait_until(
                lambda stats: stats if stats["causes"]["prompt_tokens"] else None
            )
            assert stats["causes"]["prompt_tokens"] == PAGE_TOKENS

    def test_report_that_fails_does_not_stop_later_ones(self, fresh_sidecar, caplog):
        with PageEngine(fresh_sidecar) as engine:

            def fail():
                raise ValueError("no hashes")

            engine.access.report(blocking.EngineRequest(fail, 10, 0, 0))
            engine.report(1, num_engine=0, num_loaded=0)
            fresh_sidecar.wait_until(lambda stats: stats["causes"]["prompt_tokens"] == PAGE_TOKENS)
            assert "Releasing or reporting a lookup failed" in caplog.text
