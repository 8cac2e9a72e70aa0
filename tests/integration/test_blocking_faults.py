"""Lookups, loads and stores of pages while the sidecar is killed, frozen or restarted."""

import time
from pathlib import Path

import pytest

from testing.child_process import wait_until
from testing.deadlines import CALLS
from testing.processes import RedisProcess, SidecarProcess
from tests.harness.client import blocking
from tests.harness.client.blocking import (
    Gate,
    PageEngine,
    Started,
    patient_calls,
    reattached,
    usual_calls,
    wait_released,
)
from tests.harness.engine import restart_without_memory
from tests.harness.sidecar.wire import NAMESPACE, attached, usable

DEADLINES = CALLS

__all__ = ["patient_calls", "usual_calls"]

SLACK_SECONDS = 30.0
"""Time that a busy machine may add to a limit. It is shorter than the limits of ``PATIENT``."""


@pytest.fixture
def sidecar():
    with SidecarProcess(memory_size="1Mi") as process:
        yield process


def within(seconds, call):
    """The result of a call that must not take much longer than ``seconds``."""
    began = time.monotonic()
    result = call()
    # real time: without the limit, the call takes a minute or does not end
    assert time.monotonic() - began < seconds + SLACK_SECONDS
    return result


class TestAbsentSidecar:
    def test_nothing_is_found_or_stored_until_it_starts(self, sidecar, patient_calls):
        sidecar.kill()
        Path(sidecar.socket_path).unlink()
        engine = PageEngine(sidecar)
        wait_until(lambda: "no socket at" in engine.client.detached_reason)
        assert not engine.access.is_attached
        assert engine.look_up(1) == 0
        assert engine.load(1) == 0
        assert not engine.store(1)
        engine.report(1, num_engine=0, num_loaded=0)
        sidecar.start()
        with engine:
            assert engine.access.is_attached
            assert engine.store(1)
            assert engine.run(1) == 1


class TestKilledSidecar:
    @pytest.mark.parametrize("hook", ["before_load", "after_load", "before_store", "after_store"])
    def test_copy_that_runs_while_it_restarts_is_not_wrong(self, sidecar, patient_calls, hook):
        """Loads compare the bytes of each page that they deliver."""
        is_load = hook.endswith("load")
        with PageEngine(sidecar) as engine:
            if is_load:
                engine.store(1, 2, 3)
                assert engine.look_up(1, 2, 3) == 3
            session, gate = engine.client.session, Gate()
            setattr(engine.copier, hook, gate)
            copy = Started(lambda: engine.load(1, 2, 3) if is_load else engine.store(1, 2, 3))
            gate.wait()
            sidecar.restart()
            attached(engine.client, newer_than=session)
            gate.open()
            assert copy.result() <= (3 if is_load else 0)
            usable(sidecar)
            if not is_load:
                assert engine.look_up(1, 2, 3) == 0
                sidecar.wait_until(lambda stats: stats["memory"]["used_rows"] == 0)
            assert engine.store(1, 2, 3)
            assert engine.run(1, 2, 3) == 3
            wait_released(sidecar)


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_close_ends_in_time_without_the_sidecar(sidecar, usual_calls, fault):
    with PageEngine(sidecar) as engine:
        engine.store(1)
        for _ in range(20):
            assert engine.look_up(1) == 1
        getattr(sidecar, fault)()
        within(4.0, engine.access.close)
        if fault == "freeze":
            sidecar.thaw()
            sidecar.wait_until(lambda stats: not stats["clients"])


class TestFrozenSidecar:
    def test_rows_in_memory_are_found_and_loaded(self, sidecar, usual_calls):
        with PageEngine(sidecar) as engine:
            engine.store(1, 2, 3)
            sidecar.freeze()
            assert within(0.5, lambda: engine.look_up(1, 2, 3, 4)) == 3
            assert within(0.5, lambda: engine.load(1, 2, 3)) == 3
            assert within(0.5, lambda: engine.load(1, 2, 3, 4)) == 3
            assert within(0.5, lambda: engine.look_up(9)) == 0
            sidecar.thaw()
            wait_released(sidecar)

    def test_store_ends_within_its_deadlines(self, sidecar, usual_calls):
        with PageEngine(sidecar) as engine:
            session = engine.client.session
            sidecar.freeze()
            assert not within(2.0, lambda: engine.store(1))
            wait_until(lambda: not engine.access.is_attached)
            assert not within(0.0, lambda: engine.store(2))
            sidecar.thaw()
            reattached(engine, session)
            sidecar.wait_until(lambda stats: stats["memory"]["used_rows"] == 0)
            assert engine.store(1, 2)
            assert engine.run(1, 2) == 2

    @pytest.mark.parametrize("hook", ["before_store", "after_store"])
    def test_store_that_is_frozen_between_its_calls_stores_nothing_wrong(self, sidecar, usual_calls, hook):
        with PageEngine(sidecar) as engine:
            session = engine.client.session
            setattr(engine.copier, hook, sidecar.freeze)
            assert not within(4.0, lambda: engine.store(1))
            setattr(engine.copier, hook, blocking.nothing)
            sidecar.thaw()
            reattached(engine, session)
            assert engine.run(1) in (0, 1), "the sidecar may accept the commit when it is thawed"
            assert engine.store(1, 2)
            assert engine.run(1, 2) == 2
            wait_released(sidecar)

    def test_change_of_the_namespace_does_not_wait(self, sidecar, usual_calls):
        with PageEngine(sidecar) as engine:
            engine.store(1)
            assert engine.look_up(1) == 1
            sidecar.freeze()
            within(0.0, lambda: engine.access.set_namespace(None))
            assert engine.load(1) == 0
            sidecar.thaw()
            engine.access.set_namespace(NAMESPACE)
            wait_released(sidecar)


@pytest.mark.usefixtures("patient_calls")
class TestLowerTiers:
    def test_pages_on_a_disk_are_found_and_loaded(self, tmp_path):
        with SidecarProcess(memory_size="1Mi", disk_path=tmp_path, disk_size="64Mi") as sidecar:
            with PageEngine(sidecar) as engine:
                engine.store(*range(10))
                engine.store(20, 21, 22)
            restart_without_memory(sidecar)
            with PageEngine(sidecar) as engine:
                assert engine.load(20, 21, 22, 23) == 3, "a load without a lookup promotes pages"
                assert engine.run(*range(11)) == 10
                engine.report(*range(10), num_engine=0, num_loaded=10)
                sidecar.wait_until(lambda stats: stats["causes"]["cause_tokens"] == {"disk": 640})
                wait_released(sidecar)
                assert sidecar.stats()["disk"]["promoted"] == 13

    @pytest.mark.redis
    def test_long_prompt_is_loaded_in_several_lookups(self):
        """A quarter of the rows in memory can be promoted at once."""
        with RedisProcess() as redis, SidecarProcess(memory_size="1Mi", remote_url=redis.unix_url) as sidecar:
            with PageEngine(sidecar) as engine:
                for first in range(0, 40, 5):
                    engine.store(*range(first, first + 5), prefix=range(first))
                    sidecar.wait_until(lambda stats: stats["remote"]["written"] == first + 5)  # noqa: B023
            restart_without_memory(sidecar)
            with PageEngine(sidecar) as engine:
                num_loaded = engine.run(*range(40))
                assert num_loaded > 0
                while num_loaded < 40:
                    num_more = engine.run(*range(num_loaded, 40))
                    assert num_more > 0
                    num_loaded += num_more
                wait_released(sidecar)
