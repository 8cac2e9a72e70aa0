"""Logging of this project's processes, sidecar and operator."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_MAX_LINES = 60  # per window and place in the code
_WINDOW_SECONDS = 60.0
_MAX_PROBLEMS, _REMINDER_SECONDS = 128, 600.0


def set_up(log_format: str, level: str, *filters: logging.Filter) -> None:
    """Send all log records of this process to standard error, one line each; tracebacks take more."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(log_format))
    for line_filter in filters:
        handler.addFilter(line_filter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def formatter(log_format: str) -> logging.Formatter:
    """Return a formatter of log lines: text for people, or json for collectors. Times are UTC (RFC 3339)."""
    result: logging.Formatter = _OneLine(_FORMAT)
    if log_format == "json":
        from pythonjsonlogger.json import JsonFormatter

        names = {"asctime": "time", "levelname": "level", "name": "logger"}
        result = JsonFormatter(_FORMAT, rename_fields=names)
    result.converter = time.gmtime
    result.default_time_format, result.default_msec_format = "%Y-%m-%dT%H:%M:%S", "%s.%03dZ"
    return result


class _OneLine(logging.Formatter):
    """Formats a record as one line: escapes line breaks in its message. Only tracebacks add lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


class Reminders:
    """Decides when to log a lasting problem: when it begins, and every ten minutes while it is reported."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due: dict[str, float] = {}  # time of the next line, by the problem's text

    def is_due(self, problem: str) -> bool:
        """Return whether to log the problem now."""
        now = self._clock()
        if now < self._due.get(problem, now):
            return False
        if len(self._due) >= _MAX_PROBLEMS:
            self.clear()
        self._due[problem] = now + _REMINDER_SECONDS
        return True

    def clear(self) -> None:
        """Note that there is no problem any more."""
        self._due.clear()


class FloodFilter(logging.Filter):
    """Limits the lines per minute from each place in the code, so that a log flood cannot fill the disk.

    The first line of the next minute says how many lines were omitted. Debug lines are not limited.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._windows: dict[tuple[str, int], tuple[float, int]] = {}  # start, and lines since then

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write this record."""
        place, now = (record.pathname, record.lineno), self._clock()
        start, number = self._windows.get(place, (now, 0))
        if now - start >= _WINDOW_SECONDS:
            if number > _MAX_LINES:
                record.msg = f"{record.msg} ({number - _MAX_LINES} more lines like this one were omitted)"
            start, number = now, 0
        self._windows[place] = start, number + 1
        return number < _MAX_LINES or record.levelno < logging.INFO
