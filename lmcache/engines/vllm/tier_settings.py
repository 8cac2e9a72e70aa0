"""What a tier of vLLM's OffloadingConnector is told: its settings, and what names its chunks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from lmcache import options
from lmcache.engines.errors import UnnamedError, UnsupportedError
from lmcache.engines.vllm import files
from lmcache.keys import Listed
from lmcache.tiers.base import LowerTier
from lmcache.tiers.disk.tier import DiskTier
from lmcache.tiers.remote.address import Address
from lmcache.tiers.remote.tier import RemoteTier
from lmcache.units import parse_size

_SECONDS = options.number(float, 0.01, 3600, "a number of seconds from 0.01 to 3600")

_READERS: dict[str, options.Reader] = {
    "disk_path": str,
    "disk_size": parse_size,
    "remote_url": Address.parse,
    "remote_timeout_seconds": _SECONDS,
    "remote_username_file": str,
    "remote_password_file": str,
    "weights_path": str,
    "weights_fingerprint": str,
    "lookup_seconds": _SECONDS,
    "job_seconds": _SECONDS,
}

_OF_THE_PROCESS = ("extra_config", "engine_id", "enable_kv_cache_events", "rank", "data_parallel_index",
                   "data_parallel_size", "data_parallel_rank_local")  # fmt: skip
"""What vLLM tells that differs between engines whose KV is the same."""


class TierSettings(NamedTuple):
    """An entry of ``secondary_tiers``, without what vLLM itself reads of it: docs/guides/offloading.md."""

    disk_path: str = ""
    disk_size: int = 10 << 30
    remote_url: Address | None = None
    remote_timeout_seconds: float = 1.0
    remote_username_file: str = ""
    remote_password_file: str = ""
    weights_path: str = ""
    weights_fingerprint: str = ""
    lookup_seconds: float = 1.0
    job_seconds: float = 10.0

    @classmethod
    def read(cls, given: Mapping[str, object]) -> TierSettings:
        """Read and check. Raises UnsupportedError."""
        mistakes = [f"unknown setting {name}" for name in sorted(given.keys() - _READERS.keys())]
        texts = {name: None if value is None else str(value) for name, value in given.items()}
        values, unreadable = options.read_values(_READERS, [options.Source(str, texts)])
        settings = cls(**values)
        if not unreadable and bool(settings.disk_path) == bool(settings.remote_url):
            mistakes.append("set disk_path or remote_url, one of them for each tier")
        if mistakes or unreadable:
            raise UnsupportedError(f"{'; '.join(mistakes + unreadable)} (known: {', '.join(_READERS)})")
        return settings

    def open(self, parallel: Any) -> LowerTier:
        """Return the tier; each of several replicas has a directory. Raises TierError."""
        if self.remote_url is None:
            replica = f"dp{parallel.data_parallel_index}" if parallel.data_parallel_size > 1 else ""
            return DiskTier(Path(self.disk_path) / replica, self.disk_size)
        return RemoteTier(self.remote_url, timeout_seconds=self.remote_timeout_seconds, present=self._present)

    def weights(self) -> str:
        """Fingerprint what the engine loads. May read all weights. Raises UnnamedError and OSError."""
        if self.weights_fingerprint:
            return self.weights_fingerprint
        if not self.weights_path:
            raise UnnamedError("to share them set weights_path or weights_fingerprint")
        folder = Path(self.weights_path)
        weights = files.fingerprint(folder, files.process_began())
        return weights + hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()

    def _present(self) -> Address:
        """Credentials may be rotated while we run. Raises OSError."""
        assert self.remote_url is not None
        username = _secret(self.remote_username_file, self.remote_url.username)
        password = _secret(self.remote_password_file, self.remote_url.password)
        return replace(self.remote_url, username=username, password=password)


def _secret(path: str, default: str) -> str:
    return Path(path).read_text("utf-8", "replace").strip() if path else default


def listing(config: Any, **more: Listed) -> dict[str, Listed]:
    """List what vLLM tells a tier of what makes chunks comparable (an ``OffloadingConfig``).

    All of it but what differs from process to process, also what later versions will tell: what is listed
    needlessly costs hits, what is missing would mix up KV.
    """
    described = asdict(config)
    for part in (described, described["parallel"]):
        for name in _OF_THE_PROCESS:
            part.pop(name, None)
    return {"door": "offloading", "engine": json.dumps(described, sort_keys=True, default=str), **more}
