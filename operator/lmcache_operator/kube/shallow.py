"""A JSON parser that accepts any depth of nesting.

The API server accepts objects that are thousands of levels deep. Python's parser raises RecursionError at
about one thousand, which would end a watch. The operator needs no field deeper than a pod's spec.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

_MAX_DEPTH = 200
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]')


def loads(data: bytes, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Parse JSON. If it is too deep for Python's parser, values below 200 levels become null.

    ``object_hook``: as in ``json.loads``.
    """
    try:
        return json.loads(data, object_hook=object_hook)
    except RecursionError:
        return json.loads(_prune(data), object_hook=object_hook)


def _prune(data: bytes) -> bytes:
    parts, depth, end = list[bytes](), 0, 0
    for token in _TOKEN.finditer(data):
        if token[0] in (b"{", b"["):
            depth += 1
            if depth == _MAX_DEPTH + 1:
                parts += [data[end : token.start()], b"null"]
        elif token[0] in (b"}", b"]"):
            if depth == _MAX_DEPTH + 1:
                end = token.end()
            depth -= 1
    return b"".join([*parts, data[end:]])
