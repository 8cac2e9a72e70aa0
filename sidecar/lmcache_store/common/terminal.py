"""Properties of the terminal on which a command prints."""

from __future__ import annotations

import os
from typing import TextIO


def is_colorful(stream: TextIO) -> bool:
    """Return whether to use colors: only on a terminal, and not if NO_COLOR is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
