"""Answers of the API server, which may be missing. Pure."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, NamedTuple

from lmcache_operator.specs import Object

NOT_READ = "the API server did not answer in time."


class ApiAnswer(NamedTuple):
    """The answer to one read."""

    status: int = 0
    """HTTP status; 0: no answer."""
    body: Any = None
    problem: str = NOT_READ
    """Why there is no answer."""
    missing_right: str = ""
    """Right that the user lacks, such as "list pods"; empty: none."""

    @property
    def is_known(self) -> bool:
        """Whether the API server answered with an object, or that there is none."""
        return self.status in (HTTPStatus.OK, HTTPStatus.NOT_FOUND)

    @property
    def is_missing(self) -> bool:
        """Whether there is no such object, or no such kind."""
        return self.status == HTTPStatus.NOT_FOUND

    @property
    def object(self) -> Object:
        """The object; empty if it is missing or unknown."""
        return self.body if self.status == HTTPStatus.OK and isinstance(self.body, dict) else {}

    @property
    def items(self) -> list[Object]:
        """The objects of a list; empty if they are unknown."""
        listed = self.object.get("items")
        return listed if isinstance(listed, list) else []
