import threading
from typing import Any, cast

import hypothesis.strategies as st
import pytest
from hypothesis import given

from lmcache_store.common.backoff import Backoff
from lmcache_store.tiers.circuit import Circuit, JointHealth
from lmcache_store.tiers.errors import ServerError, TierUnavailableError
from lmcache_store.tiers.remote.server import RedisServer
from testing.child_process import wait_until


class Medium:
    """A medium that fails until ``answers`` is set; its probes wait for ``may_finish``."""

    def __init__(self) -> None:
        self.answers = False
        self.num_probes = 0
        self.may_finish = threading.Event()

    def probe(self) -> None:
        self.num_probes += 1
        assert self.may_finish.wait(60)
        if not self.answers:
            raise ConnectionRefusedError("connection refused")


@pytest.fixture
def medium():
    medium = Medium()
    yield medium
    medium.may_finish.set()


HOUR = 3600.0
"""A pause after which the thread of a circuit does not probe during a test."""


class TestCircuit:
    @pytest.fixture(autouse=True)
    def prepared(self, medium):
        self.now = 100.0
        self.changes: list[bool] = []
        self.circuit = self.make(medium)
        self.circuit.subscribe(self.changes.append)
        yield
        medium.may_finish.set()
        self.circuit.end()

    def make(self, medium, base=0.1, cap=0.5) -> Circuit:
        return Circuit("medium", medium.probe, base=base, cap=cap, clock=lambda: self.now)

    def test_opens_at_the_first_failure_and_reports_the_next_probe(self):
        assert not self.circuit.is_open
        self.circuit.check()
        assert self.circuit.seconds_to_probe == 0
        assert str(self.circuit.failure("it burns")) == "medium: it burns"
        assert self.circuit.is_open
        assert self.circuit.seconds_to_probe == pytest.approx(0.1)
        with pytest.raises(TierUnavailableError, match="medium is unavailable"):
            self.circuit.check()
        self.now += 1
        assert self.circuit.seconds_to_probe == 0
        assert self.changes == [True]

    def test_success_resets_the_backoff(self):
        self.circuit.failure()
        self.circuit.failure()
        self.circuit.success()
        assert not self.circuit.is_open
        self.circuit.failure()
        assert self.circuit.seconds_to_probe == pytest.approx(0.1)
        assert self.circuit.num_outages == 1, "the outage that ended"

    def test_successful_probe_closes_without_resetting_the_backoff(self, medium):
        self.circuit = self.make(medium, HOUR, 9 * HOUR)
        self.circuit.subscribe(self.changes.append)
        medium.answers = True
        medium.may_finish.set()
        self.circuit.failure()
        assert self.circuit.probe()
        assert not self.circuit.is_open
        assert self.circuit.num_outages == 1
        assert self.changes == [True, False]
        self.circuit.failure()
        assert self.circuit.seconds_to_probe == pytest.approx(2 * HOUR)

    def test_probes_in_the_background_until_the_medium_answers(self, medium):
        circuit = self.make(medium, base=0.001)
        for _ in range(8):
            circuit.failure()
        self.now += 1
        wait_until(lambda: medium.num_probes)
        probers = [thread for thread in threading.enumerate() if thread.name == "probe medium"]
        assert len(probers) <= 2  # at most the prober of self.circuit and the prober of circuit
        medium.may_finish.set()
        medium.answers = True
        self.now += 1
        wait_until(lambda: not circuit.is_open)
        circuit.end()
        assert circuit.num_outages == 1

    def test_end_waits_for_the_probe_and_keeps_the_circuit_closed(self, medium):
        circuit = self.make(medium, base=0.0)
        circuit.failure()
        wait_until(lambda: medium.num_probes)
        threading.Timer(0.05, medium.may_finish.set).start()
        circuit.end()
        assert medium.may_finish.is_set()
        circuit.failure()
        assert not circuit.is_open

    def test_broken_probe_logs_at_most_once_per_minute(self, caplog):
        def probe() -> None:
            raise RuntimeError("a bug")

        circuit = Circuit("medium", probe, base=HOUR, cap=HOUR, clock=lambda: self.now)
        for _ in range(9):
            circuit.probe()
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert caplog.records[0].exc_info
        self.now += 61
        circuit.probe()
        assert len(caplog.records) == 2
        circuit.end()

    def test_problem_of_a_probe_replaces_the_earlier_problem_and_is_logged_once(self, medium, caplog):
        medium.may_finish.set()
        circuit = self.make(medium, HOUR, HOUR)
        for _ in range(3):
            circuit.failure("there is no key")
            assert circuit.problem == "there is no key"
            assert not circuit.probe()
            assert circuit.problem == "connection refused"
        circuit.end()
        warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert warnings == ["medium: there is no key", "medium: connection refused"]

    def test_next_operation_probes_if_no_thread_can_start(self, monkeypatch):
        def refuse(_):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
        self.circuit.failure()
        assert not self.circuit.is_open

    def test_joint_health_is_open_when_all_circuits_are_open(self, medium):
        circuits = [self.make(medium) for _ in range(2)]
        joint = JointHealth(lambda: circuits)
        circuits[0].failure()
        assert not joint.is_open
        circuits[1].failure()
        assert joint.is_open
        circuits[1].restarted()
        assert joint.num_outages == 1
        circuits[0].success()
        assert not joint.is_open
        medium.may_finish.set()
        for circuit in circuits:
            circuit.end()


@given(st.integers(1, 10**9), st.floats(1e-3, 10), st.floats(1e-3, 1e3))
def test_backoff_doubles_up_to_its_cap(failures, base, cap):
    backoff = Backoff(base, cap)
    assert backoff.seconds(1) == min(base, cap)
    assert backoff.seconds(failures) <= backoff.seconds(failures + 1) <= cap
    assert backoff.seconds(failures + 1) == min(cap, 2 * backoff.seconds(failures)) or failures > 30


@given(st.floats(0, 1), st.integers(1, 100))
def test_jitter_only_shortens_the_wait(jitter, failures):
    whole = Backoff(0.5, 60).seconds(failures)
    assert (1 - jitter) * whole <= Backoff(0.5, 60, jitter).seconds(failures) <= whole


class StaleConnection:
    """A connection whose uses end with these errors, one after the other. None: it answers."""

    is_reusable = True
    asking = False

    def __init__(self, *errors: Exception | None) -> None:
        self._errors = list(errors)

    def use(self) -> str:
        if error := self._errors.pop(0):
            raise error
        return "answer"

    def close(self) -> None:
        self.is_reusable = False


@pytest.mark.parametrize(
    ("error", "is_retried"),
    [
        (ConnectionResetError(), True),
        (BrokenPipeError(), True),
        (TimeoutError(), False),
        (ServerError("LOADING"), False),
    ],
)
def test_only_stale_connections_are_retried(error, is_retried):
    server = RedisServer("s", lambda: cast(Any, StaleConnection(None, error)), lambda _: None)
    assert server.run(StaleConnection.use) == "answer"
    if is_retried:
        assert server.run(StaleConnection.use) == "answer"
        assert server.circuit.num_outages == 1
    else:
        with pytest.raises(TierUnavailableError):
            server.run(StaleConnection.use)
    server.close()


def test_new_connection_is_not_retried():
    connections = iter([StaleConnection(ConnectionResetError())])
    server = RedisServer("s", lambda: cast(Any, next(connections)), lambda _: None)
    server.circuit.end()  # probes connect, too
    with pytest.raises(TierUnavailableError):
        server.run(StaleConnection.use)
    server.close()
