"""Fixtures with a real sidecar for tests of ``BlockingAccess``."""

import os

import pytest

from testing.processes import SidecarProcess
from tests.harness.client import blocking
from tests.harness.client.blocking import PageEngine

SMALL = "1Mi"
"""A memory tier of 62 rows."""


@pytest.fixture(scope="module")
def shared_sidecar():
    with SidecarProcess(memory_size=SMALL) as process:
        yield process


@pytest.fixture
def sidecar(shared_sidecar, monkeypatch):
    """A sidecar in whose namespace nothing is stored. It has rows of other tests."""
    shared_sidecar.wait_until(lambda stats: not stats["clients"])
    monkeypatch.setattr(blocking, "NAMESPACE", os.urandom(32))
    return shared_sidecar


@pytest.fixture
def fresh_sidecar():
    with SidecarProcess(memory_size=SMALL) as process:
        yield process


@pytest.fixture(params=[1, 2], ids=["one group", "two groups"])
def engine(request, sidecar):
    with PageEngine(sidecar, num_groups=request.param) as engine:
        yield engine
