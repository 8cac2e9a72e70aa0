"""Encryption keys of a tier: several versions, each in a file of its own. Pure.

The name of a file is the version, a decimal number without leading zeros. Its content is the key, 64
hexadecimal digits (``openssl rand -hex 32``), and possibly a line end. Each version decrypts, and one of them
encrypts. No message repeats the content of a file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

KEY_BYTES = 32
MAX_VERSION = 0xFFFF_FFFF

_VERSION = re.compile(r"[1-9][0-9]{0,9}")
_KEY = re.compile(rb"[0-9a-fA-F]{64}\n?")
_REMEDY = "write the output of 'openssl rand -hex 32' to it"


@dataclass(frozen=True)
class EncryptionKeys:
    """Keys by version, at least one."""

    by_version: Mapping[int, bytes] = field(repr=False)  # never part of a message
    write_version: int
    """Version that encrypts."""

    @property
    def versions(self) -> list[int]:
        """All versions, in ascending order."""
        return sorted(self.by_version)


class WriteVersions:
    """Chooses the version that encrypts, so that all pods which share rows can decrypt them.

    Pods read a new version at different times. So a version encrypts only some time after it was first seen.
    """

    def __init__(self, delay_seconds: float) -> None:
        """``delay_seconds``: time in which other pods read a new version, too; 0.0: rows are not shared."""
        self._delay_seconds = delay_seconds
        self._since: dict[int, float] = {}  # when each present version was first seen

    def choose(self, versions: Collection[int], now: float) -> int:
        """Return the highest version that is old enough.

        If none is, return the one that was seen first. After a start, that is the lowest one.

        ``now``: seconds on a monotonic clock.
        """
        self._since = {version: self._since.get(version, now) for version in versions}
        known = [version for version in versions if now - self._since[version] >= self._delay_seconds]
        return max(known, default=min(versions, key=lambda version: (self._since[version], version)))


def parse_keys(files: Mapping[str, bytes]) -> EncryptionKeys:
    """Parse the files of a directory, by name. The highest encrypts.

    Raises ValueError, which names the file with the mistake and the remedy.
    """
    by_version: dict[int, bytes] = {}
    for name, content in sorted(files.items()):
        version = _version(name, files)
        key = _key(name, content)
        twin = next((other for other, present in by_version.items() if present == key), None)
        if twin is not None:
            raise ValueError(f"{name} has the same key as {twin}: {_REMEDY}")
        by_version[version] = key
    if not by_version:
        raise ValueError("has no key: add a file named 1, and " + _REMEDY)
    return EncryptionKeys(by_version, max(by_version))


def _version(name: str, files: Mapping[str, bytes]) -> int:
    if _VERSION.fullmatch(name) and int(name) <= MAX_VERSION:
        return int(name)
    canonical = name.lstrip("0+")
    if canonical != name and canonical in files and _VERSION.fullmatch(canonical):
        raise ValueError(f"{name} and {canonical} are the same version: remove {name}")
    raise ValueError(f"{name} is not a version: name each key by a number from 1 to {MAX_VERSION}, such as 1")


def _key(name: str, content: bytes) -> bytes:
    if not _KEY.fullmatch(content):
        raise ValueError(f"{name} does not have 64 hexadecimal digits: {_REMEDY}")
    return bytes.fromhex(content.decode())
