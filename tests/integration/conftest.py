"""Fixtures of the tests that run a real sidecar."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

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


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tiny models: a team of threads for every tensor stalls as soon as one of its cores is taken."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
