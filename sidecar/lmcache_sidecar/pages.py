"""What a page of the HTTP face answers."""

from __future__ import annotations

from http import HTTPStatus
from typing import NamedTuple


class Page(NamedTuple):
    """Status, body, type."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
