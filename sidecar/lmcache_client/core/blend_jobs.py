"""Messages about prompts that are blended: KV of documents is reused at any position, and partly recomputed.

The scheduler side claims all tokens of such a prompt but the last one, as a load. The workers place the
stored KV of its documents in the request's blocks, and then compute chosen tokens in **slices**. The
scheduler side orders the slices, so that all ranks run the same part of the work in the same step. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from lmcache_client.core.hits import Rows


class Segment(NamedTuple):
    """Stored KV of one document, and its place in the prompt.

    Row i of ``found`` holds the tokens of chunk i of the document. The last row may hold only the beginning
    of its chunk.
    """

    start: int
    """Position in the prompt of the document's first token, whose KV was computed at position 0."""
    begin: int
    """Position in the prompt of the first token whose KV is placed; not before ``start``."""
    end: int
    """Position in the prompt behind the last token whose KV is placed."""
    found: Rows
    """Places of the document's leading rows, up to ``end``."""
    is_taken: bool = False
    """True if the KV was taken out of another prompt, so that it is not exact anywhere."""


@dataclass(frozen=True)
class BlendJob:
    """A prompt to blend into the request's blocks. All positions are tokens of the prompt."""

    request_id: str
    tokens: tuple[int, ...]
    """All tokens of the request so far."""
    blocks: tuple[int, ...]
    """The request's blocks, from its first token on."""
    begin: int
    """The engine has the KV of the tokens before it."""
    documents: int
    """Start of the first document. Reused KV of earlier tokens is exact, and never computed again."""
    question: int
    """End of the last document. Later tokens are the question."""
    end: int
    """The engine computes the tokens from here on: the last one."""
    segments: tuple[Segment, ...]
    """In ascending order, without overlap. A segment that starts at 0 is a prefix of the prompt, so its KV is
    exact unless it was taken out of another prompt."""
    selection: str
    """Name of the selection of tokens to recompute, see ``lmcache_client.blend.selection.NAMES``."""
    ratio: float
    """Share of the reused tokens to recompute, 0 to 1."""

    @property
    def exact_end(self) -> int:
        """First token whose stored KV was taken out of another prompt. No later stored KV is exact."""
        return min((segment.begin for segment in self.segments if segment.is_taken), default=self.end)


@dataclass
class BlendStep:
    """Work for blended prompts in one step."""

    jobs: list[BlendJob] = field(default_factory=list)
    """Prompts whose stored KV must be placed, from this step on."""
    ready: list[str] = field(default_factory=list)
    """Requests whose KV all ranks have placed. Their slices may run, in this order, after earlier ones."""
    dropped: list[str] = field(default_factory=list)
    """Requests that need no more slices. The workers report them as failed."""
    max_tokens: int = 0
    """Largest number of tokens that the slices of this step compute."""


class Blended(NamedTuple):
    """Result of a blended prompt, in tokens."""

    reused: int
    """Tokens whose KV was computed elsewhere, and is used as it is."""
    recomputed: int
    """Tokens with stored KV that were computed again."""
    missing: int
    """Other tokens that the slices computed, because they had no stored KV."""
