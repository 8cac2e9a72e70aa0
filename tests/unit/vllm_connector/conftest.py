"""Engines whose requests ask for blended prompts."""

import pytest

from tests.harness.client.blend_rig import BlendRig


@pytest.fixture
def make_rig(monkeypatch):
    rigs = []

    def make(*arguments, **settings):
        rigs.append(BlendRig(monkeypatch, *arguments, **settings))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.scheduler.go_offline()


@pytest.fixture
def rig(make_rig):
    """An engine whose sidecar has only memory."""
    rig = make_rig()
    rig.session.memory_only = True
    return rig
