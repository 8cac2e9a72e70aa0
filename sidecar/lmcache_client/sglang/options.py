"""SGLang's options as the running engine uses them, and our own settings."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from lmcache_client.core.settings import TOKENS_PER_SECOND
from lmcache_client.rpc.service import DEFAULT_SOCKET
from lmcache_store.common import options

MODULE = "lmcache_client.sglang.backend"
"""Module that SGLang's option ``hicache_storage_backend_extra_config`` names."""

_SECONDS = options.number(float, 0.001, 3600, "a number of seconds from 0.001 to 3600")
_WAIT = options.number(float, 0.001, 8, "a number of seconds from 0.001 to 8")
"""A flush ends SGLang's threads and waits at most 10 s for each. After that, SGLang ends the engine."""


@dataclass(frozen=True)
class SGLangSettings:
    """Settings in ``--hicache-storage-backend-extra-config``, where their names start with ``lmcache.``."""

    socket: str = options.setting(DEFAULT_SOCKET, str)
    copy_threads: int | None = options.setting(None, options.number(int, 1, 64, "a number from 1 to 64"))
    """Threads of a load; None: 2 if there is more than one core."""
    prefill_tokens_per_second: float = options.setting(0.0, TOKENS_PER_SECOND)
    """Speed of the engine, with which loads from lower tiers are compared; 0: they are always loaded."""
    lookup_seconds: float = options.setting(0.25, _WAIT)
    """Longest wait of a lookup for the answers of lower tiers."""
    row_seconds: float = options.setting(1.0, _WAIT)
    """Longest wait of a load for the next page from a lower tier."""
    load_seconds: float = options.setting(5.0, _WAIT)
    """Longest wait of a load for all of its pages."""
    lease_seconds: float = options.setting(10.0, _SECONDS)
    """Time for which pages that a lookup found can't be evicted, if SGLang does not load them."""
    min_page_tokens: int = options.setting(16, options.number(int, 1, math.inf, "a positive number"))
    """Smallest page to cache. Each page is looked up and copied separately, so small pages are slow."""


class EngineOptions:
    """Read-only view of SGLang's options: resolved values, or else values as given."""

    def __init__(self) -> None:
        from sglang.srt import runtime_context

        accessors = (
            "get_model",
            "get_lora",
            "get_spec",
            "get_memory",
            "get_parallel",
            "get_exec",
            "get_device",
        )
        found = [getattr(runtime_context, name, None) for name in accessors]
        self._sources = [accessor() for accessor in found if accessor is not None]
        self._sources += [bag.kernel for bag in self._sources if hasattr(bag, "kernel")]
        self._sources.append(runtime_context.get_server_args())

    def __getattr__(self, name: str) -> Any:
        for source in self._sources:
            try:
                return getattr(source, name)
            except (AttributeError, KeyError, RuntimeError):
                continue
        raise AttributeError(f"SGLang has no option {name}")

    @property
    def loads_backend_at_start(self) -> bool:
        """True if the engine was started with this backend, not with another one or with none."""
        text = self.hicache_storage_backend_extra_config or ""
        if self.hicache_storage_backend != "dynamic":
            return False
        if text.startswith("@"):  # a file, which may have changed: it only has to name the module
            try:
                with open(text[1:], encoding="utf-8") as file:
                    return MODULE in file.read()
            except OSError:
                return False
        try:
            return bool(json.loads(text).get("module_path") == MODULE)
        except (ValueError, AttributeError):
            return False
