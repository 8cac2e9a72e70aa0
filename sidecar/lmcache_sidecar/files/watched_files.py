"""Files and directories that the sidecar re-reads while it runs. In a pod, the kubelet updates them.

If a file is missing or invalid, the sidecar keeps the last valid content. The log and ``/stats`` give the
reason.
"""

from __future__ import annotations

import logging
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Generic, TypeVar

from lmcache_sidecar.config import ConfigError, read_text
from lmcache_store.common.units import format_size, parse_size

logger = logging.getLogger(__name__)

_MAX_SECRET_BYTES = 1 << 14
"""Largest file of a Secret. A key or a token is far smaller."""

Content = TypeVar("Content")


class Followed(ABC, Generic[Content]):
    """A path that is re-read by ``follow``. One thread at a time may use it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.problem = ""
        """Reason why the present content is not in use; empty if it is in use."""
        self._last: Content | None = None  # content at the last ``follow``; None: it was not readable

    def follow(self) -> None:
        """Read the content, unless there is no path, and use it if it changed."""
        if not self.path:
            return
        content, problem = None, ""
        try:
            content = self.read()
            if content == self._last:
                return
            self.use(content)
            logger.info("%s is %s", self.used[0], self.used[1])
        except (ConfigError, ValueError) as error:
            problem = str(error)
        self._last = content
        if problem and problem != self.problem:
            logger.error("%s is still %s: %s", *self.used, problem)
        self.problem = problem

    @abstractmethod
    def read(self) -> Content:
        """Return the present content. Raises ConfigError that names the file if it can't be read."""

    @abstractmethod
    def use(self, content: Content) -> None:
        """Use this content from now on. Raises ValueError that names the file, and then changes nothing."""

    @property
    @abstractmethod
    def used(self) -> tuple[str, str]:
        """Subject of the content, and the value in use, as text for the log."""


class FollowedFile(Followed[str]):
    """A file with a text."""

    def read(self) -> str:
        """Return the text."""
        return read_text(self.path)


class FollowedSecret(Followed[Mapping[str, bytes]]):
    """The files of a mounted Secret by name, without names that begin with a dot."""

    def __init__(self, path: str, option: str) -> None:
        """``option``: the flag with the path, for messages."""
        super().__init__(path)
        self._option = option

    def read(self) -> Mapping[str, bytes]:
        """Return the content of each file. Raises ConfigError, with the option in front."""
        files: dict[str, bytes] = {}
        try:
            for name in os.listdir(self.path):
                if not name.startswith("."):
                    self._read_file(name, files)
        except OSError as error:
            what = f"{error.filename} can't be read: {str(error.strerror).lower()}"
            raise ConfigError(f"{self._option}: {what}. Mount a Secret there") from error
        return files

    def _read_file(self, name: str, files: dict[str, bytes]) -> None:
        path = Path(self.path, name)
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise ConfigError(f"{self._option}: {path} is not a file: remove it")
            with path.open("rb") as file:
                files[name] = file.read(_MAX_SECRET_BYTES + 1)
            if len(files[name]) > _MAX_SECRET_BYTES:
                raise ConfigError(f"{self._option}: {path} has more than {_MAX_SECRET_BYTES} bytes")
        except FileNotFoundError:  # the kubelet removes it just now
            return


class SizeFile(FollowedFile):
    """The file with the target size of the memory tier, from 1 byte to ``max_bytes``."""

    def __init__(self, path: str, num_bytes: int, max_bytes: int) -> None:
        """``num_bytes`` is the size until the file has a valid one; without a path it never changes."""
        super().__init__(path)
        self.num_bytes = num_bytes
        self._max_bytes = max_bytes

    def use(self, content: str) -> None:
        """Use a new size. An empty text changes nothing: the pod may lack the annotation."""
        text = content.strip()
        if not text:
            return
        try:
            num_bytes = parse_size(text)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None
        if num_bytes > self._max_bytes:
            raise ValueError(
                f"{self.path}: {text} is more than {format_size(self._max_bytes)}, the largest size"
                " of this process: increase --memory-max-size and the arena's volume, then restart it"
            )
        self.num_bytes = num_bytes

    @property
    def used(self) -> tuple[str, str]:
        """Subject and present value, for the log."""
        return "The size of the memory tier", format_size(self.num_bytes)
