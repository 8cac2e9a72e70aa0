"""Pictures of the documentation, drawn from a recording of real programs.

``record`` makes the recording. ``terminal`` draws what commands print, and ``panels`` draws dashboards, whose
files ``boards`` reads. `make generate` writes all pictures again, and `make check` finds pictures that differ
from what the commands print, or from what the dashboards contain.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
RECORDING = Path(__file__).parent / "recording.json"
BOARDS = {"worth-it": 29, "tiers": 24}
"""Dashboards that have pictures, and the rows of their grids that the pictures show."""
