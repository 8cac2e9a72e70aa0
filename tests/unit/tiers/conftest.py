"""Fixtures shared by the tests of tiers."""

from __future__ import annotations

from tests.harness.disk_world import volume

__all__ = ["volume"]
