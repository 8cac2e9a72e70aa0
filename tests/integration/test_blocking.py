"""Lookups, loads and stores of whole pages, with a real sidecar: bytes, leases and counts."""

import dataclasses
import logging

import pytest

from tests.harness.client import blocking
from tests.harness.client.blocking import (
    PATIENT,
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


def test_pages_load_as_they_were_stored(engine):
    assert engine.look_up(1, 2, 3) == 0
    assert engine.store(1, 2, 3)
    assert engine.store(4, 5, prefix=[1, 2, 3])
    assert engine.run(1, 2, 3, 4, 5, 6) == 5
    assert engine.run(4, 5) == 2
    assert engine.store(1, 2, 3), "pages that are cached already"
    assert (engine.look_up(), engine.load(), engine.access.store(0, [], [])) == (0, 0, False)
    wait_released(engine.sidecar)


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

    def test_nothing_stays_leased_by_partial_loads_and_lookups_that_find_nothing(self, engine):
        engine.store(1, 2, 3)
        assert engine.look_up(9, 1) == 0
        assert engine.look_up(1, 2, 3) == 3
        for group in range(engine.num_groups):
            assert engine.load(1, 2, 9, group=group) == 2
            assert engine.load(9, group=group) == 0, "a load without a lookup"
        for group in range(engine.num_groups):
            assert engine.load(1, 2, group=group) == 2
        engine.settle()
        wait_released(engine.sidecar)
        assert not len(engine.access._requests)

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

    @pytest.mark.parametrize("num_copies", [1, 2], ids=["before its copy", "after its copy"])
    def test_row_that_is_reused_around_its_copy_is_not_delivered(self, sidecar, num_copies):
        """Another engine has a lease of the first page only. No row is copied after it is reused."""
        with PageEngine(sidecar) as engine, PageEngine(sidecar, engine_uuid=b"o" * 16) as other:
            engine.store(1, 2, 3)
            assert other.look_up(1) == 1
            copier = engine.copier
            copier.after_load = lambda: other.evict() if copier.num_loads == num_copies else None
            assert engine.load(1, 2, 3) == 1
            assert copier.num_loads == num_copies

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
            # Rows of other tests can't be evicted before the sidecar has their checksums.
            num_rows = sidecar.settled()["memory"]["usable_rows"]
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
            assert "A store failed; later ones go on" in caplog.text
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
            assert "A load failed; later ones go on" in caplog.text
            assert engine.run(1, 2, 3) == 3
            wait_released(sidecar)

    def test_pages_outside_the_engines_memory_are_refused(self, engine, caplog):
        # A captured stack would keep the arena mapped until the next test.
        caplog.set_level(logging.CRITICAL, "lmcache_client.core.paged.blocking")
        assert not engine.access.store(0, hashes_of([1]), [blocking.NUM_PAGES])
        assert engine.look_up(1) == 0
        engine.store(1)
        for group in range(engine.num_groups):
            assert engine.access.load(group, hashes_of([1]), [blocking.NUM_PAGES]) == 0
