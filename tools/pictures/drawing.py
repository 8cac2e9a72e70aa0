"""All pictures, drawn from the recording."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lmcache_cli.commands import explain, printing, status, status_screen
from lmcache_cli.commands.gather import Gathered, PodFigures
from tools.pictures import BOARDS, RECORDING, panels, terminal
from tools.pictures.boards import load

_WIDTH = 100
"""Columns of the terminal."""


def render() -> dict[str, str]:
    """Return the pictures by the names of their files."""
    recording = json.loads(RECORDING.read_text())
    screens = printed(gathered(recording))
    cluster = recording["cluster"]["metadata"]["name"]
    commands = {
        name: terminal.drawn(f"kubectl lmcache {name} {cluster}", lines) for name, lines in screens.items()
    }
    boards = {name: panels.drawn(load(name), recording["series"], rows) for name, rows in BOARDS.items()}
    return {f"{name}.svg": picture for name, picture in {**commands, **boards}.items()}


def printed(figures: Gathered) -> dict[str, list[str]]:
    """Return the lines that each command prints about recorded figures."""
    screen = status_screen.screen(status.status_of(figures), printing.Style(True), _WIDTH)
    return {"status": list(screen), "explain": list(explain.overview(figures))}


def gathered(recording: Mapping[str, Any]) -> Gathered:
    """Return what the commands read when the recording was made."""
    pods = (PodFigures(**pod) for pod in recording["pods"])
    return Gathered(recording["cluster"], tuple(pods), (), recording["time"])
