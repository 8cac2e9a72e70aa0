"""Reads a connector's settings from the configuration that the engine passes to it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, TypeVar

from lmcache_client.errors import UnsupportedError
from lmcache_store.common import options

T = TypeVar("T")

PREFIX = "lmcache."
"""How the names of our settings start in the engine's configuration, which may contain others."""

TOKENS_PER_SECOND = options.number(float, 0, math.inf, "a number of tokens per second")


def read_settings(kind: type[T], extra_config: Mapping[str, Any]) -> T:
    """Read and check the settings in an engine's ``extra_config``. ``LMCACHE_SOCKET`` takes precedence.

    ``kind``: a dataclass whose fields are made by ``options.setting``. Raises UnsupportedError.
    """
    readers = options.readers_of(kind)
    given = {
        key.removeprefix(PREFIX): str(value)
        for key, value in extra_config.items()
        if key.startswith(PREFIX) and value is not None
    }
    if unknown := sorted(given.keys() - readers.keys()):
        name, known = f"{PREFIX}{unknown[0]}", [f"{PREFIX}{reader}" for reader in sorted(readers)]
        hint = options.suggestion(name, known)
        raise UnsupportedError(f"unknown setting {name} (known: {', '.join(known)}){hint}")
    sources = options.environment(["socket"], os.environ), options.Source(f"{PREFIX}{{}}".format, given)
    values, mistakes = options.read_values(readers, sources)
    if mistakes:
        raise UnsupportedError(mistakes[0])
    return kind(**values)
