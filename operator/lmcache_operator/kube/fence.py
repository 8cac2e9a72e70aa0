"""The right of an operator to write, which ends when it no longer leads."""

from __future__ import annotations

import math


class WriteFence:
    """Limits the writes of an operator. This one allows all."""

    async def renew(self, url: str) -> None:
        """Ask whether the operator may write to a URL, unless it has just asked. Raises ApiError."""

    def seconds_left(self, url: str) -> float:
        """Seconds from now for which the operator may write to a URL."""
        return math.inf
