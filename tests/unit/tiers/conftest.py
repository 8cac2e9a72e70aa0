"""Fixtures shared by the tests of tiers."""

from __future__ import annotations

from tests.harness.disk_world import no_prober, volume

__all__ = ["no_prober", "volume"]
