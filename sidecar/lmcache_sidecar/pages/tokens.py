"""Tokens that open the sidecar's pages, in a directory that the sidecar re-reads while it runs."""

from __future__ import annotations

import hmac
import os
import re
from http import HTTPStatus

from lmcache_sidecar.config import ConfigError, read_text
from lmcache_sidecar.files.watched_files import Followed
from lmcache_sidecar.pages.http import Page

_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]{16,}=*")
_REFUSAL = Page(HTTPStatus.UNAUTHORIZED, b"401 Unauthorized: this page needs a bearer token\n")


class PageTokens(Followed[frozenset[bytes]]):
    """The accepted tokens: the contents of the files of a directory, in a pod a mounted Secret.

    Until the directory has valid tokens, no token is accepted.
    """

    def __init__(self, path: str) -> None:
        """An empty ``path`` means that pages need no token."""
        super().__init__(path)
        self._tokens: frozenset[bytes] = frozenset()

    def refusal(self, token: str) -> Page | None:
        """Return the answer to a client with this token; None if it may read the page."""
        sent = token.encode()
        are_equal = [hmac.compare_digest(sent, accepted) for accepted in self._tokens]
        return None if not self.path or any(are_equal) else _REFUSAL

    def read(self) -> frozenset[bytes]:
        """Return the content of each file, without files whose names begin with a dot."""
        try:
            names = [name for name in os.listdir(self.path) if not name.startswith(".")]
        except OSError as error:
            reason = str(error.strerror).lower()
            raise ConfigError(f"--http-tokens-dir: {self.path} can't be read: {reason}") from error
        return frozenset(read_text(os.path.join(self.path, name)).strip().encode() for name in names)

    def use(self, content: frozenset[bytes]) -> None:
        """Accept these tokens from now on."""
        if not content or not all(_TOKEN.fullmatch(token.decode()) for token in content):
            raise ValueError(f"{self.path}: each file must have one token of at least 16 characters")
        self._tokens = content

    @property
    def used(self) -> tuple[str, str]:
        """Subject and present value, for the log, without a token."""
        return "The number of tokens for pages", f"{len(self._tokens)}"
