"""What requests looked up: counters, and a ring of samples behind ``/samples``, whose format is in
docs/reference/samples.md.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from itertools import product
from urllib.parse import parse_qsl

import numpy as np

from lmcache.curves import HASHES, Sampler
from lmcache.rpc import kvcache_pb2 as pb
from lmcache.tiers.base import KEY_BYTES, RowKey
from lmcache.tiers.memory.contracts import Chains
from lmcache.tiers.stats import counter, counters
from lmcache.units import ceil_div
from lmcache_sidecar.clients.registry import Client, Clients
from lmcache_sidecar.clients.validation import Peer

_VERSION = 1
"""Of the answer: another one where a reader would misread it."""

_SAMPLED_ROWS = 1600
"""Of a full memory: with as many a difference of two sizes is known to 0.25 points."""

_KEPT_SECONDS = 480.0
"""That samples stay in the ring at least: who asks once a minute misses none."""

_LOWER, _MEMORY = {"disk": ord("d"), "remote": ord("r")}, ord("m")
_SLICE = 256  # requests that are rendered before others have their turn


@dataclass
class LookupStats:
    """Of requests whose chunks could be sampled. Tokens are those of whole chunks."""

    num_lookups: int = counter("Requests that engines went on with, each once, by what they looked up")
    lookup_tokens: int = counter("Tokens that they looked up")
    hit_tokens: Counter[str] = counters("tier", "Tokens found in the engine's own cache, or else in a tier")
    loaded_tokens: Counter[str] = counters("tier", "Tokens that engines load, by where they were found")
    miss_bytes: int = counter("Bytes of rows that were found nowhere")


class Samples:
    """Belongs to the event loop. Follows one namespace: distances across several would be noise."""

    def __init__(self, clients: Clients, clock: Callable[[], float] = time.time) -> None:
        self.stats = LookupStats()
        self._clients = clients
        self._clock = clock
        self._num_dropped = 0  # by samplers of before
        self._restart(None)

    def _restart(self, peer: Peer | None) -> None:
        self._sampler = Sampler(kept_seconds=_KEPT_SECONDS)
        self._started = self._clock()
        self._num_slots = 0  # usable ones, that the rate is for
        self._peer = peer  # one of those who are followed
        self._namespace = peer.hello.namespace if peer else b""
        self.chunk_tokens = peer.hello.geometry.chunk_tokens if peer else 0
        """Of one key; 0: nobody is followed yet, here and below."""
        sizes = list(peer.chunk_bytes.values()) if peer else []
        slot_bytes = peer.geometry.slot_bytes if peer else 1
        num_columns = peer.geometry.num_columns if peer else 1
        self.row_bytes = sum(ceil_div(size, slot_bytes) for size in sizes) * slot_bytes * num_columns
        """What a chunk takes in memory, of all ranks and KV groups."""
        self.kv_bytes_per_token = sum(sizes) * num_columns / max(1, self.chunk_tokens)
        """Of all ranks and KV groups, as stored."""
        self._slot_bytes = slot_bytes * num_columns  # of all columns

    # ---- on the hot path ----

    def note(
        self,
        peer: Peer,
        chains: Chains,
        scheduled: pb.Scheduled,
        usable_slots: int,
        origins: MutableMapping[RowKey, str],
    ) -> None:
        """Count a request. ``origins``: which tier brought a row that nobody has used since."""
        keys = chains.keys[0]
        if not keys or not self._follows(peer):
            return
        if usable_slots != self._num_slots:
            self._num_slots = usable_slots
            num_rows = usable_slots * self._slot_bytes // self.row_bytes
            self._sampler.rate = min(1.0, _SAMPLED_ROWS / max(1, num_rows))
        num_hit = min(scheduled.num_hit_chunks, len(keys))
        num_held = min(scheduled.num_engine_chunks, num_hit)
        tiers = b"-" * (len(keys) - num_hit) + b"m" * (num_hit - num_held) + b"e" * num_held
        brought: dict[str, int] = {}
        if origins:
            letters = bytearray(tiers)
            for of_group, at in product(chains.keys, range(num_held, num_hit)):
                name = origins.pop(of_group[at], "")
                if name in _LOWER and letters[-1 - at] == _MEMORY:  # a chunk counts once
                    letters[-1 - at] = _LOWER[name]
                    brought[name] = brought.get(name, 0) + 1
            tiers = bytes(letters)
        self._count(len(keys), num_hit, num_held, brought, scheduled.num_loaded_tokens)
        words = np.frombuffer(b"".join(keys), "<u8").reshape(len(keys), -1)[::-1]
        names = words[:, -1]
        if keys[0][:KEY_BYTES] != self._namespace:  # after a reset
            names = names ^ words[:, 0]
        self._sampler.record(self._clock(), names.tobytes(), tiers)

    def _follows(self, peer: Peer) -> bool:
        """The namespace that was there first, until none of its engines is attached."""
        if peer is not self._peer and peer.hello.namespace != self._namespace:
            if self.followed():
                return False
            self._num_dropped = self.num_dropped
            self._restart(peer)
        return True

    def _count(
        self, num_chunks: int, num_hit: int, num_held: int, brought: Mapping[str, int], num_loaded: int
    ) -> None:
        stats, chunk_tokens = self.stats, self.chunk_tokens
        stats.num_lookups += 1
        stats.lookup_tokens += num_chunks * chunk_tokens
        stats.miss_bytes += (num_chunks - num_hit) * self.row_bytes
        if num_held:
            stats.hit_tokens["engine"] += num_held * chunk_tokens
        in_memory = num_hit - num_held - sum(brought.values())
        for name, num_found in (*brought.items(), ("memory", in_memory)):
            if num_found:  # what was half in the engine is memory's
                stats.hit_tokens[name] += num_found * chunk_tokens
                stats.loaded_tokens[name] += min(num_loaded, num_found * chunk_tokens)
                num_loaded -= min(num_loaded, num_found * chunk_tokens)

    # ---- figures ----

    def followed(self) -> list[Client]:
        """The attached clients whose requests are sampled."""
        clients = self._clients.by_uuid.values()
        return [one for one in clients if one.is_attached and one.peer.hello.namespace == self._namespace]

    @property
    def num_dropped(self) -> int:
        """Samples that left the ring, since the start of the process."""
        return self._num_dropped + self._sampler.num_dropped

    @property
    def namespace(self) -> str:
        """Whose requests are followed, in hexadecimal digits; empty: nobody's yet."""
        return self._namespace.hex()

    # ---- the page ----

    async def answer(self, query: str) -> bytes:
        """The JSON text, in slices: other tasks run in between. Raises ValueError for a bad query."""
        since, below = _parse_query(query)
        sampler, now = self._sampler, self._clock()
        head = {
            "version": _VERSION, "now": now, "started": self._started,
            "namespace": self.namespace, "chunk_tokens": self.chunk_tokens, "row_bytes": self.row_bytes,
        }  # fmt: skip
        (first, kept), following = sampler.since(since), sampler.position
        slices = [kept[at : at + _SLICE] for at in range(0, len(kept), _SLICE)]
        bound, start = min(below, sampler.bound), kept[0].time if kept else 0.0
        for part in slices:
            bound = min(bound, *(request.bound for request in part))
            await asyncio.sleep(0)
        head |= {
            "below": bound, "since": first, "next": following, "dropped": first - min(since, first),
            "t0": start,
        }  # fmt: skip
        ms, num, keys, tiers = [], [], [], []  # as JSON writes them, slice by slice
        for part in slices:
            told = [request.below(bound) for request in part]
            ms.append(",".join([str(round((request.time - start) * 1000)) for request in told]))
            num.append(",".join([str(len(request.tiers)) for request in told]))
            keys.append(b"".join(request.keys for request in told).hex())
            tiers.append(b"".join(request.tiers for request in told).decode())
            await asyncio.sleep(0)
        text = json.dumps(head, separators=(",", ":"))[:-1]
        text += f',"ms":[{",".join(ms)}],"num":[{",".join(num)}]'
        text += f',"key":"{"".join(keys)}","tier":"{"".join(tiers)}"}}\n'
        return text.encode()


def _parse_query(query: str) -> tuple[int, int]:
    since, below = 0, HASHES
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in ("since", "below"):
            raise ValueError(f"{name[:32]!r} is no parameter: since and below are")
        lowest, highest = (0, HASHES) if name == "since" else (1, HASHES)
        # No sign, no underscore, and no digits that would take long.
        number = int(value) if value.isascii() and value.isdigit() and len(value) <= 20 else -1
        if not lowest <= number <= highest:
            raise ValueError(f"{name} must be a number from {lowest} to {highest}, it is {value[:32]!r}")
        since, below = (number, below) if name == "since" else (since, number)
    return since, below
