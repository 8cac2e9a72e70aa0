"""Fixtures of the tests that run a real sidecar."""

from __future__ import annotations

from tests.harness.engine import connect, sidecar

__all__ = ["connect", "sidecar"]
