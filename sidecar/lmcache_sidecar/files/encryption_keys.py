"""The encryption keys of one tier, in a directory that the sidecar re-reads while it runs.

In a pod, the directory is a mounted Secret. ``lmcache_store.tiers.encryption.keys`` describes its files. Only
this module of the sidecar imports the cipher, so that the package ``cryptography`` is not loaded without
need.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lmcache_sidecar.files.watched_files import FollowedSecret
from lmcache_store.tiers.encryption.aes import AesGcm
from lmcache_store.tiers.encryption.keys import EncryptionKeys, WriteVersions, parse_keys

logger = logging.getLogger(__name__)


class KeysDirectory(FollowedSecret):
    """The keys of a tier. ``cipher`` uses them, and has the same problem until there are any."""

    def __init__(
        self,
        path: str,
        option: str,
        tier: str,
        delay_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``option``: the flag with the path. ``tier`` is the name of the tier.

        ``delay_seconds``: time from the first sight of a version until it encrypts, see ``WriteVersions``.
        """
        super().__init__(path, option)
        self.cipher = AesGcm(tier)
        self._tier = tier
        self._write_versions = WriteVersions(delay_seconds)
        self._clock = clock

    def follow(self) -> None:
        """Read the directory, and use its keys if they changed. A new version encrypts after the delay."""
        super().follow()
        keys = self.cipher.keys
        if keys is None:
            self.cipher.problem = self.problem
        elif (updated := self._with_write_version(keys)) != keys:
            self.cipher.use(updated)
            logger.info("%s is %s", *self.used)

    def use(self, content: Mapping[str, bytes]) -> None:
        """Use these keys from now on."""
        try:
            keys = parse_keys(content)
        except ValueError as error:
            raise ValueError(f"{self._option}: {self.path}: {error}") from None
        self.cipher.use(self._with_write_version(keys))

    @property
    def used(self) -> tuple[str, str]:
        """Subject and present value, for the log."""
        keys = self.cipher.keys
        text = f"{_listed(keys.versions)}, and {keys.write_version} encrypts" if keys else "empty"
        return f"The set of encryption keys of the {self._tier} tier", text

    @property
    def facts(self) -> dict[str, Any]:
        """Versions in use, for ``/stats``. They contain no key."""
        keys = self.cipher.keys
        versions = {"write_version": keys and keys.write_version, "versions": keys.versions if keys else []}
        return {"encryption": versions, "encryption_problem": self.problem}

    def _with_write_version(self, keys: EncryptionKeys) -> EncryptionKeys:
        version = self._write_versions.choose(keys.versions, self._clock())
        return replace(keys, write_version=version)


def _listed(versions: list[int]) -> str:
    return f"version{'s' * (len(versions) > 1)} {', '.join(map(str, versions))}"
