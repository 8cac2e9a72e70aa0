"""Fixtures of the tests that run a real sidecar."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache.rpc.service import Method
from lmcache.rpc.session import DEFAULT_TIMEOUT_SECONDS, Session
from tests.harness.engine import connect, sidecar

__all__ = ["connect", "sidecar"]


@pytest.fixture(autouse=True)
def _patient_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls may take a minute unless a test says how long: a sidecar may get no processor for seconds."""
    call = Session._call

    def patient(session: Session, method: Method, timeout: float, **fields: Any) -> Any:
        return call(session, method, 60.0 if timeout == DEFAULT_TIMEOUT_SECONDS else timeout, **fields)

    monkeypatch.setattr(Session, "_call", patient)
