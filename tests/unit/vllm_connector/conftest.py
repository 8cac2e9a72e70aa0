"""Rigs of the scheduler side of vLLM's connector. Their requests ask for blended prompts by default."""

from functools import partial

import pytest

from tests.harness.client.blend_rig import BlendRig


@pytest.fixture
def new_rig(monkeypatch):
    """The constructor of rigs. Modules override it."""
    return partial(BlendRig, monkeypatch)


@pytest.fixture
def make_rig(new_rig):
    rigs = []

    def make(*arguments, **settings):
        rigs.append(new_rig(*arguments, **settings))
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
