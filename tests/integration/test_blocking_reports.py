"""Reports of an engine that loads whole pages, as a real sidecar counts them."""

import json

import pytest

from lmcache_client.core.paged.blocking import PagedRequest
from lmcache_store.common.timing import TIMING
from testing.child_process import wait_until
from testing.deadlines import CALLS
from tests.harness.client.blocking import PAGE_TOKENS, PageEngine, Started, patient_calls, usual_calls
from tests.harness.client.blocking_fixtures import engine, fresh_sidecar, shared_sidecar, sidecar
from tests.harness.sidecar.wire import NAMESPACE

DEADLINES = CALLS

__all__ = ["engine", "fresh_sidecar", "patient_calls", "shared_sidecar", "sidecar", "usual_calls"]

pytestmark = pytest.mark.usefixtures("patient_calls")


@pytest.mark.parametrize("num_groups", [1, 2])
def test_counts_are_right_to_the_token(fresh_sidecar, num_groups):
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


def test_times_of_a_requests_lookups_and_loads_are_reported_once(fresh_sidecar):
    with PageEngine(fresh_sidecar) as engine:
        engine.store(1, 2, 3)
        assert engine.run(1, 2) == 2
        assert engine.run(3) == 1
        engine.settle()
        stats = fresh_sidecar.stats()
        assert (stats["lookups"]["num_lookups"], stats["causes"]["prompt_tokens"]) == (0, 0), "no request yet"
        for _ in range(2):
            engine.report(1, 2, 3, num_engine=0, num_loaded=3)

        def times():
            requests = json.loads(fresh_sidecar.get("/requests"))["requests"]
            is_timed = len(requests) == 2 and all(r["load_seconds"] is not None for r in requests)
            return requests if is_timed else None

        second, first = wait_until(times)
        assert first["lookup_seconds"] > 0
        assert first["load_seconds"]["memory"] > 0
        assert second["lookup_seconds"] == 0
        assert second["load_seconds"]["memory"] == 0


def test_reports_without_a_namespace_or_hashes_and_late_ones_are_dropped(fresh_sidecar, monkeypatch, caplog):
    """Later reports go on."""

    def fail():
        raise ValueError("no hashes")

    with PageEngine(fresh_sidecar) as engine:
        engine.access.set_namespace(None)
        engine.report(1, num_engine=0, num_loaded=0)
        engine.access.set_namespace(NAMESPACE)
        with monkeypatch.context() as patch:
            patch.setattr(TIMING, "report_seconds", 0.0)
            engine.report(1, 2, num_engine=0, num_loaded=0)
        engine.access.report(PagedRequest(fail, 10, 0, 0))
        engine.report(1, num_engine=0, num_loaded=0)
        stats = fresh_sidecar.wait_until(lambda stats: stats if stats["causes"]["prompt_tokens"] else None)
        assert (stats["causes"]["prompt_tokens"], stats["lookups"]["num_lookups"]) == (PAGE_TOKENS, 1)
        assert "Releasing or reporting a lookup failed" in caplog.text


def test_report_waits_while_calls_pause(fresh_sidecar, usual_calls, monkeypatch):
    """A call that was not answered in time, of any thread, makes all calls pause."""
    monkeypatch.setattr(TIMING, "lookup_seconds", 0.5)
    with PageEngine(fresh_sidecar) as engine:
        fresh_sidecar.freeze()
        assert engine.look_up(1) == 0
        assert engine.access._calls.session is None, "calls pause"
        report = Started(lambda: engine.report(1, num_engine=0, num_loaded=0))
        fresh_sidecar.thaw()
        report.result()
        fresh_sidecar.wait_until(lambda stats: stats["lookups"]["num_lookups"] == 1)
