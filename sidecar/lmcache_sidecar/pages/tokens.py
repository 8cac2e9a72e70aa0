"""Tokens that open the sidecar's pages, in a directory that the sidecar re-reads while it runs."""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from http import HTTPStatus

from lmcache_sidecar.files.watched_files import FollowedSecret
from lmcache_sidecar.pages.http import Page

_TOKEN = re.compile(rb"[A-Za-z0-9._~+/-]{16,}=*")
_REFUSAL = Page(HTTPStatus.UNAUTHORIZED, b"401 Unauthorized: this page needs a bearer token\n")


class PageTokens(FollowedSecret):
    """The accepted tokens: the contents of the files of a directory, in a pod a mounted Secret.

    Until the directory has valid tokens, no token is accepted.
    """

    def __init__(self, path: str) -> None:
        """An empty ``path`` means that pages need no token."""
        super().__init__(path, "--http-tokens-dir")
        self._tokens: frozenset[bytes] = frozenset()

    def refusal(self, token: str) -> Page | None:
        """Return the answer to a client with this token; None if it may read the page."""
        sent = token.encode()
        are_equal = [hmac.compare_digest(sent, accepted) for accepted in self._tokens]
        return None if not self.path or any(are_equal) else _REFUSAL

    def use(self, content: Mapping[str, bytes]) -> None:
        """Accept these tokens from now on."""
        tokens = frozenset(token.strip() for token in content.values())
        if not tokens or not all(map(_TOKEN.fullmatch, tokens)):
            raise ValueError(f"{self.path}: each file must have one token of at least 16 characters")
        self._tokens = tokens

    @property
    def used(self) -> tuple[str, str]:
        """Subject and present value, for the log, without a token."""
        return "The number of tokens for pages", f"{len(self._tokens)}"
