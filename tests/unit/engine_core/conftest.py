"""The scheduler side of most tests here, and engines that wait for their cache."""

import pytest

from lmcache_store.common.timing import TIMING
from tests.harness.client.scheduler_rig import Rig


@pytest.fixture(autouse=True)
def _patient_start(monkeypatch):
    """Let the worker side attach within a minute. An engine would continue without it after two seconds."""
    monkeypatch.setattr(TIMING, "start_seconds", 60.0)


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.scheduler.go_offline()
