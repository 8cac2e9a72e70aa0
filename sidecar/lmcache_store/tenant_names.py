"""Names of tenants in the spec, the tenants file, statistics and commands. Pure."""

from __future__ import annotations

import re
from typing import Final, TypeGuard

DEFAULT_NAME: Final = "default"
"""Name of all requests whose salt has no name, and of requests without a salt."""

MAX_CHARACTERS: Final = 63
"""Maximum length of a name."""

MAX_NAMED: Final = 64
"""Maximum number of tenants with an entry. Statistics have figures for each of them, and the operator reads a
bounded number of bytes."""

PATTERN: Final = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
"""Regular expression that each whole name matches."""

_NAME = re.compile(PATTERN)


def is_name(value: object) -> TypeGuard[str]:
    """Return whether a value is a valid name. DEFAULT_NAME is one, too."""
    return isinstance(value, str) and len(value) <= MAX_CHARACTERS and _NAME.fullmatch(value) is not None
