"""Lengths of time on the command line. Pure."""

from __future__ import annotations

import argparse
import re

_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_TIME = re.compile(r"(?:[0-9]{1,9}[smhdw])+")
_PART = re.compile(r"([0-9]+)([smhdw])")


def parse_seconds(text: str) -> int:
    """Return the seconds of a time such as "30s", "1h30m" or "7d". Raises argparse.ArgumentTypeError."""
    parts = _PART.findall(text) if _TIME.fullmatch(text) else ()
    if not (seconds := sum(int(number) * _UNIT_SECONDS[unit] for number, unit in parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 30m, 2h or 7d")
    return seconds
