"""Log lines: one event each, as text for people or as JSON for collectors."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

_MAX_LINES = 60  # of one place in the code
_WINDOW_SECONDS = 60.0

_TIME = "%Y-%m-%dT%H:%M:%S"  # RFC 3339; always UTC


class Floods(logging.Filter):
    """Lets only so many lines of one place in the code through: whoever provokes them must not fill the disk.

    The first line of the next window says how many were left out. Debug lines are not limited.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._windows: dict[tuple[str, int], tuple[float, int]] = {}  # their start, and lines since

    def filter(self, record: logging.LogRecord) -> bool:
        """Is it to be written?"""
        place, now = (record.pathname, record.lineno), self._clock()
        start, number = self._windows.get(place, (now, 0))
        if now - start >= _WINDOW_SECONDS:
            if number > _MAX_LINES:
                record.msg = f"{record.msg} ({number - _MAX_LINES} more lines like this one were left out)"
            start, number = now, 0
        self._windows[place] = start, number + 1
        return number < _MAX_LINES or record.levelno < logging.INFO


def set_up(log_format: str, level: str) -> None:
    """Send everything to standard error."""
    formatter = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)-7s %(name)s: %(message)s", _TIME)
    if log_format == "json":
        from pythonjsonlogger.json import JsonFormatter

        names = {"asctime": "time", "levelname": "level", "name": "logger"}
        formatter = JsonFormatter(
            "%(asctime)s %(levelname)s %(name)s %(message)s", f"{_TIME}Z", rename_fields=names
        )
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    handler.addFilter(Floods())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
