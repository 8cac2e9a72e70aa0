"""Counters of lookups, and a ring of sampled lookups that ``/samples`` serves.

docs/reference/samples.md describes the format of the answer.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl

import numpy as np

from lmcache_sidecar.clients.registry import Client, Clients
from lmcache_sidecar.clients.validation import ParsedHello
from lmcache_sidecar.explain.sources import NAMES, loaded_tokens
from lmcache_store.common.units import ceil_div
from lmcache_store.curves import HASHES, Sampler
from lmcache_store.tiers.base import KEY_BYTES, RowKey
from lmcache_store.tiers.memory.contracts import Chains
from lmcache_store.tiers.stats import counter, counters

_VERSION = 1
"""Version of the answer; it changes when a reader would misread the new format."""

_SAMPLED_ROWS = 1600
"""Sampled rows of a full memory tier: they resolve two sizes to 0.25 percentage points of hits."""

_RETENTION_SECONDS = 480.0
"""Minimum time that samples stay in the ring: a reader that asks once a minute misses none."""

_SLICE = 256  # requests to render before other tasks run


@dataclass
class LookupStats:
    """Counters of requests of the sampled namespace. Tokens are those of whole chunks."""

    num_lookups: int = counter("Requests that engines scheduled, each counted once")
    lookup_tokens: int = counter("Tokens that these requests looked up")
    hit_tokens: Counter[str] = counters("tier", "Tokens found in the engine's own cache, or else in a tier")
    loaded_tokens: Counter[str] = counters("tier", "Tokens that engines load, by the tier that held them")


class LookupSampler:
    """Samples the lookups of one namespace. The event loop owns it.

    Distances between keys of several namespaces would be noise.
    """

    def __init__(self, clients: Clients, clock: Callable[[], float] = time.time) -> None:
        self.stats = LookupStats()
        self._clients = clients
        self._clock = clock
        self._num_dropped = 0  # samples that earlier samplers dropped
        self._restart(None)

    def _restart(self, peer: ParsedHello | None) -> None:
        self._sampler = Sampler(kept_seconds=_RETENTION_SECONDS)
        self._started = self._clock()
        self._num_slots = 0  # usable slots for which the rate was computed
        self._peer = peer  # a client of the sampled namespace
        self._namespace = peer.hello.namespace if peer else b""
        self.chunk_tokens = peer.hello.geometry.chunk_tokens if peer else 0
        """Tokens of one key. This and the figures below are 0 until the first lookup."""
        sizes = list(peer.chunk_bytes.values()) if peer else []
        slot_bytes = peer.geometry.slot_bytes if peer else 1
        num_columns = peer.geometry.num_columns if peer else 1
        self.row_bytes = sum(ceil_div(size, slot_bytes) for size in sizes) * slot_bytes * num_columns
        """Bytes of a chunk in memory, of all ranks and KV groups."""
        self.kv_bytes_per_token = sum(sizes) * num_columns / max(1, self.chunk_tokens)
        """Bytes of a token's KV as stored, of all ranks and KV groups."""
        self._slot_bytes = slot_bytes * num_columns  # bytes of a slot in all columns

    # ---- on the hot path ----

    def note(
        self,
        peer: ParsedHello,
        chains: Chains,
        sources: bytes,
        num_loaded_tokens: int,
        num_blended_tokens: int,
        usable_slots: int,
    ) -> None:
        """Count a request, and sample its keys. ``sources``: see ``find_sources``.

        Rows of documents take the place of its last chunks: ``note_document`` counts them.
        """
        if (keys := chains.keys[0]) and self.follow(peer):
            self.stats.num_lookups += 1
            num_keys = max(len(sources), len(keys) - num_blended_tokens // chains.chunk_tokens)
            self._note(keys[:num_keys], sources, num_loaded_tokens, usable_slots)

    def note_document(self, peer: ParsedHello, chains: Chains, sources: bytes, usable_slots: int) -> None:
        """Count rows of a document that a prompt loads. The prompt is another request."""
        if self.follow(peer):
            self._note(chains.keys[0], sources, len(sources) * chains.chunk_tokens, usable_slots)

    def _note(self, keys: Sequence[RowKey], sources: bytes, num_loaded: int, usable_slots: int) -> None:
        if not keys:
            return
        if usable_slots != self._num_slots:
            self._num_slots = usable_slots
            num_rows = usable_slots * self._slot_bytes // self.row_bytes
            self._sampler.rate = min(1.0, _SAMPLED_ROWS / max(1, num_rows))
        self._count(len(keys), sources, num_loaded)
        words = np.frombuffer(b"".join(keys), "<u8").reshape(len(keys), -1)[::-1]
        names = words[:, -1]
        if keys[0][:KEY_BYTES] != self._namespace:  # after a reset
            names = names ^ words[:, 0]
        self._sampler.record(self._clock(), names.tobytes(), sources.ljust(len(keys), b"-")[::-1])

    def follow(self, peer: ParsedHello) -> bool:
        """Sample the client's namespace if no other one is sampled, and return whether it is sampled.

        The first namespace is sampled until none of its clients is attached. Then sampling starts again with
        the namespace of the next lookup.
        """
        if peer is not self._peer and peer.hello.namespace != self._namespace:
            if self.followed():
                return False
            self._num_dropped = self.num_dropped
            self._restart(peer)
        return True

    def _count(self, num_chunks: int, sources: bytes, num_loaded: int) -> None:
        stats, chunk_tokens = self.stats, self.chunk_tokens
        stats.lookup_tokens += num_chunks * chunk_tokens
        for letter, num_found in Counter(sources).items():  # a chunk that was partly in the engine: memory
            stats.hit_tokens[NAMES[letter]] += num_found * chunk_tokens
        stats.loaded_tokens.update(loaded_tokens(sources, num_loaded, chunk_tokens))

    # ---- figures ----

    def followed(self) -> list[Client]:
        """The attached clients whose requests are sampled."""
        clients = self._clients.by_uuid.values()
        return [c for c in clients if c.is_attached and c.peer.hello.namespace == self._namespace]

    def counted(self) -> list[Client]:
        """The same clients; none on the nodes whose sidecars do not count the requests."""
        return self.followed() if self._sampler.position else []

    @property
    def computes_on_cpu(self) -> bool:
        """Do all workers among these clients compute on CPUs?"""
        workers = [client.peer.hello for client in self.followed() if client.peer.is_worker]
        return bool(workers) and all(worker.computes_on_cpu for worker in workers)

    @property
    def num_dropped(self) -> int:
        """Samples dropped from the ring since the start of the process."""
        return self._num_dropped + self._sampler.num_dropped

    @property
    def namespace(self) -> str:
        """Sampled namespace in hexadecimal digits; empty before the first lookup."""
        return self._namespace.hex()

    # ---- the page ----

    async def answer(self, query: str) -> bytes:
        """Return the JSON text of ``/samples``. Raises ValueError for a bad query.

        Renders slice by slice, so that other tasks can run in between.
        """
        since, below = _parse_query(query)
        sampler, now = self._sampler, self._clock()
        head = {
            "version": _VERSION, "now": now, "started": self._started,
            "namespace": self.namespace, "chunk_tokens": self.chunk_tokens, "row_bytes": self.row_bytes,
        }  # fmt: skip
        (first, requests), following = sampler.since(since), sampler.position
        slices = [requests[start : start + _SLICE] for start in range(0, len(requests), _SLICE)]
        bound, t0 = min(below, sampler.bound), requests[0].time if requests else 0.0
        for part in slices:
            bound = min(bound, *(request.bound for request in part))
            await asyncio.sleep(0)
        head |= {
            "below": bound, "since": first, "next": following, "dropped": first - min(since, first),
            "t0": t0,
        }  # fmt: skip
        ms, num, keys, tiers = [], [], [], []  # JSON texts of the fields, slice by slice
        for part in slices:
            sampled = [request.below(bound) for request in part]
            ms.append(",".join([str(round((request.time - t0) * 1000)) for request in sampled]))
            num.append(",".join([str(len(request.tiers)) for request in sampled]))
            keys.append(b"".join(request.keys for request in sampled).hex())
            tiers.append(b"".join(request.tiers for request in sampled).decode())
            await asyncio.sleep(0)
        text = json.dumps(head, separators=(",", ":"))[:-1]
        text += f',"ms":[{",".join(ms)}],"num":[{",".join(num)}]'
        text += f',"key":"{"".join(keys)}","tier":"{"".join(tiers)}"}}\n'
        return text.encode()


def _parse_query(query: str) -> tuple[int, int]:
    since, below = 0, HASHES
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in ("since", "below"):
            raise ValueError(f"unknown parameter {name[:32]!r}: use since and below")
        lowest, highest = (0, HASHES) if name == "since" else (1, HASHES)
        # int() would accept signs, underscores and very long numbers.
        number = int(value) if value.isascii() and value.isdigit() and len(value) <= 20 else -1
        if not lowest <= number <= highest:
            raise ValueError(f"{name} must be a number from {lowest} to {highest}, it is {value[:32]!r}")
        since, below = (number, below) if name == "since" else (since, number)
    return since, below
