"""Lookups, loads and stores of pages while the sidecar is killed, frozen, restarted or slow."""

import contextlib
import dataclasses
import socket
import threading
import time
from pathlib import Path

import pytest

from lmcache_client.core.paged.blocking import Limits
from lmcache_client.core.paged.page_requests import row_keys
from testing.child_process import wait_until
from testing.deadlines import CALLS
from testing.processes import RedisProcess, SidecarProcess
from tests.harness.client import blocking
from tests.harness.client.blocking import (
    PATIENT,
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

SHORT = Limits(lookup_seconds=0.2, row_seconds=0.2, load_seconds=0.5, lease_seconds=3600.0)


class StallingProxy:
    """A proxy before Redis that holds back requests of one command; a context manager."""

    def __init__(self, port):
        self._target_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self._command = b""  # requests with this text are held back; empty: none
        self._passes = threading.Event()
        self._passes.set()
        self._sockets = []
        self._threads = []
        self._begin(self._accept)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.resume()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60)
        for connection in self._sockets:
            connection.close()

    def stall(self, command):
        """Hold back requests of this command, and all later bytes of their connections."""
        self._passes.clear()
        self._command = command

    def resume(self):
        """Send what was held back."""
        self._command = b""
        self._passes.set()

    def _begin(self, function, *arguments):
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:
                return
            self._sockets += [client, server]
            self._begin(self._forward, client, server, True)
            self._begin(self._forward, server, client, False)

    def _forward(self, source, target, is_request):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if is_request and self._command and self._command in data:
                    self._passes.wait()
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


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

    def test_lookup_that_waits_ends_with_the_sidecar(self, sidecar, usual_calls):
        with PageEngine(sidecar) as engine:
            engine.store(1)
            sidecar.freeze()
            lookup = Started(lambda: engine.look_up(1))
            sidecar.kill()
            assert lookup.result() in (0, 1), "the index of the killed sidecar may still show the page"
            assert engine.load(1) in (0, 1)


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


def start_load(engine, monkeypatch):
    """Start to load pages 0 to 7, which are not in memory. Returns when the load waits for them."""
    waits, attempt = threading.Event(), engine.access._calls.attempt

    def noted(call):
        result = attempt(call)
        waits.set()
        return result

    engine.settle()
    monkeypatch.setattr(engine.access._calls, "attempt", noted)
    load = Started(lambda: engine.load(*range(8)))
    assert waits.wait(60)
    return load


def state(engine):
    """State of pages 0 to 7 in the sidecar."""
    keys = [(0, row_keys(engine.hello.namespace, blocking.hashes_of(range(8)), 0))]
    return engine.client.session.lookup("state", keys, hint=True)


@pytest.mark.redis
@pytest.mark.usefixtures("patient_calls")
class TestSlowRedis:
    @pytest.fixture
    def proxy(self):
        with RedisProcess() as redis, StallingProxy(redis.port) as proxy:
            yield proxy

    @pytest.fixture
    def sidecar(self, proxy):
        """A sidecar with an empty memory, and pages 0 to 7 in Redis behind a proxy."""
        with SidecarProcess(memory_size="1Mi", remote_url=proxy.url, remote_timeout_seconds=30) as sidecar:
            with PageEngine(sidecar) as engine:
                engine.store(*range(8))
                sidecar.wait_until(lambda stats: stats["remote"]["written"] == 8)
            restart_without_memory(sidecar)
            yield sidecar

    def test_lookup_does_not_wait_longer_than_its_limit(self, sidecar, proxy):
        limits = dataclasses.replace(PATIENT, lookup_seconds=0.05)
        with PageEngine(sidecar, limits) as engine:
            proxy.stall(b"HEXISTS")
            assert within(0.05, lambda: engine.look_up(*range(8))) == 0
            assert state(engine).is_probing, "there is no answer yet"
            proxy.resume()
            wait_until(lambda: engine.run(*range(8)) == 8)
            wait_released(sidecar)

    @pytest.mark.parametrize("limit", ["row_seconds", "load_seconds"])
    def test_load_ends_after_the_limit_of_a_row_or_of_the_load(self, sidecar, proxy, limit):
        with PageEngine(sidecar, dataclasses.replace(PATIENT, **{limit: 0.05})) as engine:
            engine.store(0, 1, 2)
            proxy.stall(b"HMGET")
            assert engine.look_up(*range(8)) == 8
            assert within(0.05, lambda: engine.load(*range(8))) == 3, "pages in memory, before the wait"
            proxy.resume()
            engine.settle()
            wait_until(lambda: engine.run(*range(8)) == 8)
            wait_released(sidecar)

    @pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "another namespace"])
    def test_wait_ends_with_the_sidecar_or_the_namespace(self, sidecar, proxy, monkeypatch, is_killed):
        with PageEngine(sidecar) as engine:
            proxy.stall(b"HMGET")
            assert engine.look_up(*range(8)) == 8
            load = start_load(engine, monkeypatch)
            sidecar.kill() if is_killed else engine.access.set_namespace(None)
            assert load.result() == 0
            if not is_killed:
                assert state(engine).num_pending == 8, "the pages have not arrived yet"
                proxy.resume()
                engine.settle()
                wait_released(sidecar)
                assert within(2.0, engine.access.close) is None
