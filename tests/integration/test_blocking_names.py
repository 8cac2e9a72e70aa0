"""Names, windows and columns of whole pages, with a real sidecar."""

import os

import pytest

from tests.harness.client import blocking
from tests.harness.client.blocking import (
    Gate,
    PageEngine,
    Started,
    hashes_of,
    patient_calls,
    wait_leased,
    wait_released,
)
from tests.harness.client.blocking_fixtures import engine, fresh_sidecar, shared_sidecar, sidecar

__all__ = ["engine", "fresh_sidecar", "patient_calls", "shared_sidecar", "sidecar"]

pytestmark = pytest.mark.usefixtures("patient_calls")


class TestNamespaces:
    def test_sidecar_shows_why_a_name_is_private(self, sidecar):
        with PageEngine(sidecar) as engine:
            engine.look_up(1)
            assert sidecar.stats()["private_reason"] == ""
            engine.access.set_namespace(os.urandom(32), "the weights were updated")
            engine.look_up(1)
            assert sidecar.stats()["private_reason"] == "the weights were updated"

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

    @pytest.mark.parametrize("is_load", [True, False], ids=["lookup of a load", "answered lookup"])
    def test_lookup_that_runs_during_a_change_finds_nothing_and_leaves_no_lease(
        self, sidecar, monkeypatch, is_load
    ):
        """The change comes before the sidecar is asked for the page of a load, or after it has answered."""
        with PageEngine(sidecar) as engine:
            engine.store(1, 2)
            assert not is_load or engine.look_up(1, 2) == 2
            session = engine.client.session
            gate, lookup = Gate(), session.lookup

            def late(request_id, group_keys, **options):
                if is_load and not options.get("hint"):
                    gate()
                result = lookup(request_id, group_keys, **options)
                if not is_load and not options.get("hint"):
                    gate()
                return result

            monkeypatch.setattr(session, "lookup", late)
            call = Started(lambda: engine.load(1, 2, 3) if is_load else engine.look_up(1, 2))
            gate.wait()
            engine.access.set_namespace(None if is_load else os.urandom(32))
            engine.settle()
            gate.open()
            assert call.result() == 0
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
            engine.access.set_namespace(blocking.NAMESPACE)  # the fixtures give each test another
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
