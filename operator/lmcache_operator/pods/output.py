"""The last error in the output of a container that ended. Pure."""

from __future__ import annotations

import re

from lmcache_operator.specs.redaction import Redactor
from lmcache_store.common.text import plain

_MAX_LINES, _MAX_CHARACTERS = 5, 600
_PREFIX = r"(\([^)]*\) )?((ERROR|WARNING) \d\S* \S+ \[[^]]*\] )?"
"""Start of vLLM's lines: the process, and what its log adds."""
_NOISE = re.compile(
    rf"{_PREFIX}(  File |    |Traceback|During handling of|The above exception|For further information|$)"
    r"|.*(ulimit|resource_tracker|leaked \S+ objects|destroy_process_group|[Ss]ee root cause above)"
)
"""Frames of a traceback, and what processes print at their end whatever the cause is."""
_ERROR = re.compile("(error|exception): ", re.IGNORECASE)


def last_error(output: str) -> str:
    """The last error with the lines that follow it; without an error, the last lines."""
    all_lines = Redactor().text(output).splitlines()
    lines = [line for line in all_lines if not _NOISE.match(line)] or all_lines
    errors = [number for number, line in enumerate(lines) if _ERROR.search(line)]
    quoted = lines[errors[-1] :][:_MAX_LINES] if errors else lines[-_MAX_LINES:]
    text = " | ".join(filter(None, (plain(line, _MAX_CHARACTERS) for line in quoted)))
    return text[:_MAX_CHARACTERS] if errors else text[-_MAX_CHARACTERS:]
