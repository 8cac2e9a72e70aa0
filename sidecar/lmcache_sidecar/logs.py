"""Log lines: one event each, as text for people or as JSON for collectors."""

from __future__ import annotations

import logging
import sys
import time

_TIME = "%Y-%m-%dT%H:%M:%S"  # RFC 3339; always UTC


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
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
