"""Files that are followed while they change, as a kubelet keeps those of a pod up to date.

A file that can't be used changes nothing, and the log and ``/stats`` say why.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod

from lmcache.units import format_size, parse_size
from lmcache_sidecar.config import ConfigError, read_text

logger = logging.getLogger(__name__)


class FollowedFile(ABC):
    """Used by one thread at a time."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.problem = ""
        """Why what is used is not the file's; empty: it is."""
        self._seen: str | None = None

    def follow(self) -> None:
        """Use what is in the file now."""
        text, problem = None, ""
        try:
            text = read_text(self.path)
            if text == self._seen:
                return
            self.use(text)
            logger.info("%s is %s", self.used[0], self.used[1])
        except (ConfigError, ValueError) as error:
            problem = str(error)
        self._seen = text
        if problem and problem != self.problem:
            logger.error("%s stays %s: %s", *self.used, problem)
        self.problem = problem

    @abstractmethod
    def use(self, text: str) -> None:
        """Use this text from now on. Raises ValueError, naming the file, and then nothing has changed."""

    @property
    @abstractmethod
    def used(self) -> tuple[str, str]:
        """What the file is about, and what of it is used now."""


class SizeFile(FollowedFile):
    """The size that the memory tier is to have now: from 1 byte to ``most_bytes``."""

    def __init__(self, path: str, num_bytes: int, most_bytes: int) -> None:
        """``num_bytes``: while the file has said nothing yet. No path: for good."""
        super().__init__(path)
        self.num_bytes = num_bytes
        self._most_bytes = most_bytes

    def follow(self) -> None:
        """See ``FollowedFile``."""
        if self.path:
            super().follow()

    def use(self, text: str) -> None:
        """See ``FollowedFile``. Nothing is asked for by an empty one: a pod without the annotation has it."""
        if not text.strip():
            return
        try:
            num_bytes = parse_size(text.strip())
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None
        if num_bytes > self._most_bytes:
            most = format_size(self._most_bytes)
            raise ValueError(
                f"{self.path}: {text.strip()} is more than {most}, to which the memory tier of this process"
                " can grow: it takes a larger --memory-max-size, and volume"
            )
        self.num_bytes = num_bytes

    @property
    def used(self) -> tuple[str, str]:
        """See ``FollowedFile``."""
        return "The size of the memory tier", format_size(self.num_bytes)
