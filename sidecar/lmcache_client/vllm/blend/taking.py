"""Takes documents out of computed prompts, on the scheduler side.

A request may name documents that are not stored. The engine then computes its prompt, and the workers store
the KV of each such document, with K rotated to positions from 0 on. So later prompts can reuse documents that
were never computed alone.

The KV of a document within a prompt depends on the text before it. So it is not the KV of the prompt that
consists of the document, and its rows have **taken keys**, for which no exact lookup asks. A document is
looked up by its exact keys first, and by its taken keys if it has no exact rows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from lmcache_client.core.grid import NULL_BLOCK, BlockTables, Grid
from lmcache_client.core.jobs import GroupStore, StoreJob
from lmcache_client.core.lookups import LookupThread
from lmcache_client.core.requests import RequestState, Ticket
from lmcache_client.core.stores import Stores
from lmcache_client.vllm.blend.asked import AskedBlend
from lmcache_client.vllm.blend.documents import num_storable
from lmcache_store.common.units import ceil_div

MIN_TOKENS = 64
"""Length of the shortest document that is taken. Each row has the size of a whole chunk."""


@dataclass(frozen=True)
class TakeJob(StoreJob):
    """A store of a document within a prompt.

    Each row holds a chunk of the document. The chunk may begin inside its first block, so there is one block
    more for each row than the row has. The last row may hold only the beginning of its chunk.
    """

    start: int = 0
    """Position in the prompt of the document's first token."""
    num_tokens: int = 0
    """Tokens of the document that are stored."""


def taken_ticket(exact: Ticket) -> Ticket:
    """Return the ticket of a document's taken rows. The keys of its ``exact`` ticket must be known."""
    hashes = [hashlib.sha256(b"taken" + block_hash).digest() for block_hash in exact.hashes]
    return Ticket(
        f"{exact.request_id} taken", hashes, exact.namespace, exact.cache_salt, exact.tenant, is_counted=False
    )


def look_up_taken(blend: AskedBlend, lookups: LookupThread, num_known: int) -> bool:
    """Look up the documents without exact rows by their taken keys, once. Return True if there are any.

    ``num_known``: leading tokens of the prompt with KV. Documents within them need no rows.
    """
    documents = list(blend.documents)
    for number, (document, lookup) in enumerate(zip(blend.params.documents, documents, strict=True)):
        if lookup is None or lookup.num_found or number in blend.taken or document.stop <= num_known:
            continue
        if lookup.ticket.keys and lookup.ticket.keys[0]:  # else its hashes are not known
            documents[number] = taken = RequestState(blend.view, taken_ticket(lookup.ticket))
            blend.taken.add(number)
            lookups.ask(taken.ticket)
    has_changed, blend.documents = documents != list(blend.documents), tuple(documents)
    return has_changed


def plan_takes(
    blend: AskedBlend, state: RequestState, stores: Stores, grid: Grid, tables: BlockTables | None
) -> list[StoreJob]:
    """Create a job for each document that lacks taken rows, if the prompt was computed exactly.

    A document at the beginning of the prompt has exact KV. Its chunks are stored anyway, so only its tail is
    stored here.

    Args:
        blend: the documents.
        state: the request, whose documents are all computed when the running step ends.
        stores: the running jobs.
        grid: the grid of the engine's tokens, with one group.
        tables: blocks of the request; None: not known.
    """
    if tables is None or not state.is_exact or state.has_failed:
        return []
    jobs: list[StoreJob] = []
    for number, (document, lookup) in enumerate(zip(blend.params.documents, blend.documents, strict=True)):
        if lookup is None or len(document) < MIN_TOKENS:
            continue
        lacks_rows = lookup.num_found < len(lookup.ticket.hashes)
        if not document.start:
            if number in blend.taken or lacks_rows:
                jobs += stores.plan_tail(state, tables[0], document.stop)
        elif number in blend.taken and lacks_rows and lookup.ticket.keys:
            jobs += _plan_take(document, lookup.ticket, state, stores, grid, tables)
    return jobs


def _plan_take(
    document: range, ticket: Ticket, state: RequestState, stores: Stores, grid: Grid, tables: BlockTables
) -> list[StoreJob]:
    (group,), size = grid.stored, grid.hash_tokens
    num_tokens, num_blocks = num_storable(grid, len(document)), grid.blocks_per_row(group) + 1
    end = ceil_div(document.start + num_tokens, size)
    table = list(tables[group.group][:end])
    if len(table) < end or ticket.keys is None:
        return []
    blocks: list[int] = []
    for first in range(document.start // size, (document.start + num_tokens) // size, num_blocks - 1):
        row = table[first : first + num_blocks]
        blocks += row + row[-1:] * (num_blocks - len(row))
    if NULL_BLOCK in blocks:
        return []
    part = GroupStore(group.group, 0, b"".join(ticket.keys[0]), tuple(blocks))
    job = stores.begin(state, [part], slice(0))
    return [TakeJob(**vars(job), start=document.start, num_tokens=num_tokens)]
