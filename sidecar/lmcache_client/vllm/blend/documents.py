"""Finds the stored KV of a prompt's documents, and decides whether the prompt is blended.

A document's KV is the KV of a prompt that consists of the document: ordinary rows under ordinary keys. The
chunks of a document leave its last tokens without a key. So the **tail** has a key of its own: that of the
document's last full block. An exact lookup asks only for prefixes of whole chunks, and a hash covers the
length of its prefix, so it never finds a tail.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmcache_client.core.blend_jobs import BlendJob, Segment
from lmcache_client.core.grid import Grid
from lmcache_client.core.hits import Rows
from lmcache_client.core.requests import ExtraKeys, Ticket
from lmcache_client.vllm.blend.params import BlendParams
from lmcache_store.common.units import ceil_div

MIN_SLICE_TOKENS = 256
"""Tokens of slices in a step that computes much else: blended prompts must make progress, too."""


class ExactView:
    """A request with the salt and the hashes that it had before ``salt`` replaced them.

    The core looks up and stores exact KV by these. All other fields are those of the request.
    """

    def __init__(self, request: Any) -> None:
        self.block_hashes: Sequence[bytes] = list(request.block_hashes)
        self.cache_salt = request.cache_salt
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


@dataclass(frozen=True)
class Claim:
    """KV of a prompt to blend. All positions are tokens of the prompt."""

    params: BlendParams
    begin: int
    """The engine has the KV of the tokens before it."""
    num_exact: int
    """Tokens from there on whose KV the sidecar has as part of the prompt."""
    segments: tuple[Segment, ...]
    rows: tuple[range, ...]
    """For each document that was looked up: its rows with KV that is placed."""

    @property
    def num_document_tokens(self) -> int:
        """Tokens whose KV comes from rows of documents, not from the prompt's own rows."""
        return sum(segment.end - segment.begin for segment in self.segments) - self.num_exact

    @property
    def num_exact_in_documents(self) -> int:
        """Tokens of documents whose KV comes from the prompt's own rows."""
        first, last = self.params.documents[0].start, self.params.documents[-1].stop
        return max(0, min(self.begin + self.num_exact, last) - max(self.begin, first))

    def job(self, request_id: str, request: Any, blocks: Sequence[int]) -> BlendJob:
        """Return the job that blends the prompt of a request in these blocks."""
        tokens, documents = request.all_token_ids, self.params.documents
        return BlendJob(
            request_id,
            tuple(tokens),
            tuple(blocks),
            self.begin,
            documents[0].start,
            documents[-1].stop,
            len(tokens) - 1,
            self.segments,
            self.params.selection,
            self.params.ratio,
        )


def hash_document(tokens: Sequence[int], request: Any, hash_tokens: int, algorithm: str) -> list[bytes]:
    """Return the engine's hashes of a prompt of these tokens with the salt of ``request``.

    Runs on the lookup thread: 8,000 tokens take about 10 ms.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens

    function, hashes, parent = get_hash_fn_by_name(algorithm), [], None
    extra_keys, _ = generate_block_hash_extra_keys(request, 0, hash_tokens, 0)  # the salt
    for end in range(hash_tokens, len(tokens) + 1, hash_tokens):
        parent = hash_block_tokens(function, parent, tokens[end - hash_tokens : end], extra_keys)
        hashes.append(bytes(parent))
        extra_keys = None
    return hashes


def num_storable(grid: Grid, num_tokens: int) -> int:
    """Return how many tokens of a document can have stored KV: those of its full blocks."""
    return num_tokens // grid.hash_tokens * grid.hash_tokens


def num_reusable(params: BlendParams, grid: Grid) -> int:
    """Return how many tokens of documents only a blended prompt can reuse, if all of them are stored."""
    return sum(num_storable(grid, len(document)) for document in params.documents if document.start)


def num_keys(grid: Grid, num_tokens: int) -> int:
    """Return the number of keys of a document: those of its chunks, and one of its tail."""
    return ceil_div(num_storable(grid, num_tokens), grid.chunk_tokens)


def key_hashes(grid: Grid, block_hashes: Sequence[bytes]) -> list[bytes]:
    """Return the hashes of a document's keys: those of its chunks, and that of its tail."""
    num_tokens = len(block_hashes) * grid.hash_tokens
    num_chunks = num_tokens // grid.chunk_tokens
    tail = block_hashes[-1:] if num_chunks < num_keys(grid, num_tokens) else []
    return [*grid.chunk_hashes(block_hashes, 0, num_chunks), *map(bytes, tail)]


def document_ticket(
    exact: Ticket, number: int, document: range, view: ExactView, grid: Grid, algorithm: str
) -> Ticket | None:
    """Return the ticket of a document of a prompt, or None if the document is shorter than a block.

    Args:
        exact: ticket of the whole prompt.
        number: the document's number, from 0.
        document: positions of the document's tokens.
        view: the request.
        grid: the grid of the engine's tokens.
        algorithm: name of the engine's hash function.
    """
    hashes = [b""] * num_keys(grid, len(document))
    if not hashes:
        return None
    tokens = view.all_token_ids[document.start : document.stop]

    def make_hashes() -> ExtraKeys:
        hashes[:] = key_hashes(grid, hash_document(tokens, view, grid.hash_tokens, algorithm))
        return ()

    return Ticket(
        f"{exact.request_id}#{number}",
        hashes,
        exact.namespace,
        exact.cache_salt,
        exact.tenant,
        make_hashes,
        is_counted=False,
    )


def find_claim(
    params: BlendParams,
    grid: Grid,
    begin: int,
    exact: Rows,
    found: Sequence[Rows],
    min_tokens: int,
    num_tokens: int,
    taken: Container[int] = (),
) -> Claim | None:
    """Return the KV to blend, or None if the engine must compute the prompt.

    A prompt is blended if ``min_tokens`` tokens have KV that only a blended prompt can use, and at least half
    of the documents' tokens that the engine lacks have KV. Where the engine has found the documents itself,
    at least half of all tokens behind the exact KV must have KV, and only these tokens are documents: a
    prompt may share no more than the beginning of a document that the engine knows.

    Args:
        params: how to blend.
        grid: the grid of the engine's tokens.
        begin: leading tokens that the engine itself has.
        exact: leading rows of the prompt.
        found: leading rows of each document.
        min_tokens: the engine's setting.
        num_tokens: tokens of the prompt.
        taken: numbers of the documents whose rows were taken out of other prompts.
    """
    end = max(begin, len(exact.rows) * grid.chunk_tokens)
    segments = [Segment(0, begin, end, exact)] if end > begin else []
    used, placed = [range(0)] * len(params.documents), list[range]()
    num_reused = num_lacking = 0
    for number, (document, rows) in enumerate(zip(params.documents, found, strict=True)):
        num_lacking += max(0, document.stop - max(document.start, begin))
        first = max(document.start, end)
        num_stored = min(len(rows.rows) * grid.chunk_tokens, num_storable(grid, len(document)))
        last = document.start + num_stored
        if last > first:
            segments.append(Segment(document.start, first, last, rows, number in taken))
            placed.append(range(first, last))
            used[number] = range((first - document.start) // grid.chunk_tokens, len(rows.rows))
            if document.start or number in taken:  # else its KV is exact
                num_reused += last - first
    if params.is_detected:
        first, num_lacking, params = end, num_tokens - end, replace(params, documents=tuple(placed))
    else:
        first = params.documents[0].start  # tokens before it are no documents
    num_known = sum(max(0, segment.end - max(segment.begin, first)) for segment in segments)
    if num_reused < min_tokens or 2 * num_known < num_lacking:
        return None
    return Claim(params, begin, end - begin, tuple(segments), tuple(used))


def slice_tokens(max_tokens: int, num_tokens: int) -> int:
    """Return how many tokens slices may compute in a step that computes ``num_tokens``.

    ``max_tokens``: largest number of tokens of a step.
    """
    return max(min(MIN_SLICE_TOKENS, max_tokens), max_tokens - num_tokens)
