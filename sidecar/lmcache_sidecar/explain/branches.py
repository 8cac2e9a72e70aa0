"""The points at which most prompts leave earlier prompts. Pure. Holds no text of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MAX_BRANCHES = 256


@dataclass
class Branch:
    """A common prefix after which prompts differ."""

    prefix: str
    """Hash of the prefix."""
    depth_tokens: int
    """Tokens of the prefix, at least."""
    num_requests: int = 0
    """Requests that left earlier prompts here."""
    num_tokens: int = 0
    """Tokens that they computed after it."""


class Branches:
    """The branches with the most computed tokens. The number of branches is bounded."""

    def __init__(self) -> None:
        self._by_name: dict[int, Branch] = {}

    def note(self, name: int, depth_tokens: int, num_tokens: int) -> None:
        """Count a request that leaves earlier prompts after this prefix."""
        branch = self._by_name.get(name)
        if branch is None:
            if len(self._by_name) >= _MAX_BRANCHES:
                largest = self.top(_MAX_BRANCHES // 2)
                self._by_name = {int(branch.prefix, 16): branch for branch in largest}
            branch = self._by_name[name] = Branch(f"{name:016x}", depth_tokens)
        branch.num_requests += 1
        branch.num_tokens += num_tokens

    def top(self, number: int) -> Sequence[Branch]:
        """Return the branches with the most computed tokens, the largest first."""
        return sorted(self._by_name.values(), key=lambda branch: -branch.num_tokens)[:number]
