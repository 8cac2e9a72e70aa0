"""Log lines: of the processes of ours (sidecar, operator), and of the library in somebody else's process."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
_LIBRARY_FORMAT = "[%(asctime)s] LMCache %(levelname)s: %(message)s [%(name)s] -- %(filename)s:%(lineno)d"
_MAX_LINES = 60  # of one place in the code
_WINDOW_SECONDS = 60.0


def set_up(log_format: str, level: str, *filters: logging.Filter) -> None:
    """Send all lines of this process to standard error, one event each."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(log_format))
    for line_filter in filters:
        handler.addFilter(line_filter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def formatter(log_format: str) -> logging.Formatter:
    """Return what makes lines: text for people, or json for collectors; times are UTC (RFC 3339)."""
    made: logging.Formatter = _OneLine(_FORMAT)
    if log_format == "json":
        from pythonjsonlogger.json import JsonFormatter

        names = {"asctime": "time", "levelname": "level", "name": "logger"}
        made = JsonFormatter(_FORMAT, rename_fields=names)
    made.converter = time.gmtime
    made.default_time_format, made.default_msec_format = "%Y-%m-%dT%H:%M:%S", "%s.%03dZ"
    return made


class _OneLine(logging.Formatter):
    """Whatever a message quotes is no line of its own: only tracebacks follow."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


class FloodFilter(logging.Filter):
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


def init_logger(name: str) -> logging.Logger:
    """Return the logger ``name`` with a handler of its own, not propagating to the root logger.

    Its level is LMCACHE_LOG_LEVEL (a level's name, any case), INFO when unset. An unknown name counts as INFO
    and is said in a warning: a typing error in an environment variable must not keep an engine from starting.
    Calling it again for the same name returns the same logger and adds nothing.
    """
    logger = logging.getLogger(name)
    if logger.handlers:
        return logger
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_LIBRARY_FORMAT))
    logger.addHandler(handler)
    logger.propagate = False
    wanted = os.environ.get("LMCACHE_LOG_LEVEL") or "INFO"
    level = logging.getLevelName(wanted.upper())
    logger.setLevel(level if isinstance(level, int) else logging.INFO)
    if not isinstance(level, int):
        logger.warning("LMCACHE_LOG_LEVEL=%r is not a log level; taking INFO", wanted)
    return logger
