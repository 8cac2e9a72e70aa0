"""The scheduler side of most tests here."""

import pytest

from tests.harness.client.scheduler_rig import Rig


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.scheduler.go_offline()
