"""Calls that pause after the sidecar was silent."""

from types import SimpleNamespace

import grpc
import pytest

from lmcache_client.core import calls as calls_module
from lmcache_client.core.calls import PAUSE_SECONDS, Calls
from lmcache_client.rpc.errors import RpcRefusedError, SidecarUnavailableError, StaleSessionError


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(calls_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def client():
    return SimpleNamespace(session=SimpleNamespace(epoch=7))


def fail(error):
    def call(session):
        raise error

    return call


def test_nothing_is_called_while_detached(client, clock):
    client.session = None
    calls = Calls(client)
    assert calls.session is None
    assert calls.attempt(lambda session: pytest.fail("no session")) is None


def test_calls_pause_after_each_silence(client, clock):
    calls, made = Calls(client), []
    for number in (1, 2):
        assert calls.attempt(fail(SidecarUnavailableError("silent"))) is None
        assert calls.session is None
        clock.now += PAUSE_SECONDS * 0.99
        assert calls.attempt(made.append) is None
        clock.now += PAUSE_SECONDS * 0.01
        assert calls.session is client.session
        calls.attempt(made.append)
        assert made == [client.session] * number


@pytest.mark.parametrize(
    "error", [StaleSessionError("over"), RpcRefusedError(grpc.StatusCode.INVALID_ARGUMENT, "no")]
)
def test_refused_call_pauses_nothing(client, clock, error):
    calls = Calls(client)
    assert calls.attempt(fail(error)) is None
    assert calls.session is client.session
