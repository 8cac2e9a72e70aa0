"""JSON of any depth, without recursion's limit.

The API server takes objects that are thousands of levels deep, and Python's parser gives up at about one
thousand, with an error that ends whoever doesn't expect it. Nothing the operator reads on purpose is deeper
than a pod's spec.
"""

from __future__ import annotations

import json
import re
from typing import Any

_MAX_DEPTH = 200
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]')


def loads(data: bytes) -> Any:
    """The value. Where it is too deep to be read, what lies below 200 levels is null."""
    try:
        return json.loads(data)
    except RecursionError:
        return json.loads(_prune(data))


def _prune(data: bytes) -> bytes:
    kept, depth, end = [], 0, 0
    for token in _TOKEN.finditer(data):
        if token[0] in (b"{", b"["):
            depth += 1
            if depth == _MAX_DEPTH + 1:
                kept += [data[end : token.start()], b"null"]
        elif token[0] in (b"}", b"]"):
            if depth == _MAX_DEPTH + 1:
                end = token.end()
            depth -= 1
    return b"".join([*kept, data[end:]])
