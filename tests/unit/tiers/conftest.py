"""Fixtures shared by the tests of tiers."""

import pytest

from tests.harness.tiers.disk_restarts import restartable_tier
from tests.harness.tiers.disk_world import no_prober, patient_stores, volume

__all__ = ["no_prober", "patient_stores", "volume"]


@pytest.fixture
def path(tmp_path):
    """A directory for a disk tier, or a file for an arena."""
    return tmp_path / "tier"


@pytest.fixture
def restart(path):
    """Start a disk tier in place of the last one."""
    with restartable_tier(path) as start:
        yield start


@pytest.fixture
def tier(restart):
    tier = restart()
    assert tier.indexed.wait(60)
    return tier
