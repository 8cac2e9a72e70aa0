"""Settings of a tier of vLLM's OffloadingConnector, and the listing that identifies its chunks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lmcache.common import options
from lmcache.common.units import parse_size
from lmcache.engines.core import files
from lmcache.engines.errors import UnnamedError, UnsupportedError
from lmcache.keys import Listed
from lmcache.tiers.base import LowerTier
from lmcache.tiers.disk.tier import DiskTier
from lmcache.tiers.remote.address import Address
from lmcache.tiers.remote.tier import RemoteTier

_SECONDS = options.number(float, 0.01, 3600, "a number of seconds from 0.01 to 3600")

_PROCESS_FIELDS = ("extra_config", "engine_id", "enable_kv_cache_events", "rank", "data_parallel_index",
                   "data_parallel_size", "data_parallel_rank_local")  # fmt: skip
"""Fields of vLLM's OffloadingConfig that differ between engines with the same KV."""


@dataclass(frozen=True)
class TierSettings:
    """Settings in an entry of ``secondary_tiers``, without vLLM's own. See docs/guides/offloading.md."""

    disk_path: str = options.setting("", str)
    disk_size: int = options.setting(10 << 30, parse_size)
    remote_url: Address | None = options.setting(None, Address.parse)
    remote_timeout_seconds: float = options.setting(1.0, _SECONDS)
    remote_username_file: str = options.setting("", str)
    remote_password_file: str = options.setting("", str)
    weights_path: str = options.setting("", str)
    weights_fingerprint: str = options.setting("", str)
    lookup_seconds: float = options.setting(1.0, _SECONDS)
    job_seconds: float = options.setting(10.0, _SECONDS)

    @classmethod
    def read(cls, given: Mapping[str, object]) -> TierSettings:
        """Read and check the settings. Raises UnsupportedError, which names all mistakes."""
        readers = options.readers_of(cls)
        mistakes = [f"unknown setting {name}" for name in sorted(given.keys() - readers.keys())]
        texts = {name: None if value is None else str(value) for name, value in given.items()}
        values, unreadable = options.read_values(readers, [options.Source(str, texts)])
        settings = cls(**values)
        if not unreadable and bool(settings.disk_path) == bool(settings.remote_url):
            mistakes.append("set disk_path or remote_url, one of them for each tier")
        if mistakes or unreadable:
            raise UnsupportedError(f"{'; '.join(mistakes + unreadable)} (known: {', '.join(readers)})")
        return settings

    def open(self, parallel: Any) -> LowerTier:
        """Open the tier. Data-parallel replicas get a directory each. Raises TierError."""
        if self.remote_url is None:
            replica = f"dp{parallel.data_parallel_index}" if parallel.data_parallel_size > 1 else ""
            return DiskTier(Path(self.disk_path) / replica, self.disk_size)
        return RemoteTier(self.remote_url, timeout_seconds=self.remote_timeout_seconds, present=self._present)

    def weights(self) -> str:
        """Hash the weights that the engine loads. May read all of them. Raises UnnamedError or OSError."""
        if self.weights_fingerprint:
            return self.weights_fingerprint
        if not self.weights_path:
            raise UnnamedError("to share them set weights_path or weights_fingerprint")
        folder = Path(self.weights_path)
        weights = files.fingerprint(folder, files.process_start_time())
        return weights + hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()

    def _present(self) -> Address:
        """Return the URL with the present credentials, which may be rotated at any time. Raises OSError."""
        assert self.remote_url is not None
        username = _secret(self.remote_username_file, self.remote_url.username)
        password = _secret(self.remote_password_file, self.remote_url.password)
        return replace(self.remote_url, username=username, password=password)


def _secret(path: str, default: str) -> str:
    return Path(path).read_text("utf-8", "replace").strip() if path else default


def listing(config: Any, **more: Listed) -> dict[str, Listed]:
    """List everything that makes chunks comparable, from vLLM's ``OffloadingConfig``.

    Includes all fields that don't differ from process to process, also fields of later versions. A needless
    field costs hits, but a missing one would mix up KV.
    """
    fields = asdict(config)
    for part in (fields, fields["parallel"]):
        for name in _PROCESS_FIELDS:
            part.pop(name, None)
    return {"door": "offloading", "engine": json.dumps(fields, sort_keys=True, default=str), **more}
