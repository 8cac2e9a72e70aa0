"""Measure the memory tier without copies: time and memory per chunk, and payload as a share of the arena."""

from __future__ import annotations

import gc
import gzip
import json
import random
import statistics
import time
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

from benchmarks.report import Figure, Report, at_least, at_most
from lmcache_store.tiers.memory.allocator import SLOTS_PER_FRAME
from lmcache_store.tiers.memory.contracts import Geometry
from lmcache_store.tiers.memory.local import LocalStore
from lmcache_store.tiers.memory.slots import SlotTable

SLOT_BYTES = 4096
CHUNK_BYTES = SLOTS_PER_FRAME * SLOT_BYTES
SIZES = (10_000, 100_000, 1_000_000)  # chunks
PROMPT_CHUNKS = 32  # 8k tokens in chunks of 256
ROUNDS = 300
ALLOWED_MICROSECONDS, ALLOWED_GROWTH, ALLOWED_BYTES = 10.0, 1.2, 400.0

TRACE = Path(__file__).parent / "traces" / "mooncake_conversation_trace.jsonl.gz"
CHUNK_TOKENS = 256
NUM_REQUESTS = 2_000
MIX_CHUNKS = 1_000  # number of full chunks that the arena can hold


class NoBytes:
    """An arena without memory, so that only the tier itself is measured."""

    first_generation = 1
    shared_index = None
    is_lost = False

    def __init__(self, num_slots: int) -> None:
        self.geometry = Geometry(SLOT_BYTES, 1)
        self.num_rows = self.ready_rows = num_slots
        self.table = SlotTable.blank(1, num_slots)

    def view(self, row: int, column: int, length: int | None = None) -> memoryview:
        raise NotImplementedError


def nothing(row: int, length: int = 0) -> None:
    pass


def resident_bytes() -> int:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) << 10


class Timed:
    """A store full of prompts, with the time per chunk of each operation on a prompt."""

    def __init__(self, num_chunks: int) -> None:
        self.samples: dict[str, list[float]] = {}
        self.num_prompts = num_chunks // PROMPT_CHUNKS
        gc.collect()
        before = resident_bytes()
        self.store = LocalStore(NoBytes(self.num_prompts * PROMPT_CHUNKS * SLOTS_PER_FRAME))
        for prompt in range(self.num_prompts):
            self.put(self.keys(prompt), prompt)
        gc.collect()
        self.overhead_bytes = (resident_bytes() - before) / num_chunks

    def keys(self, prompt: int) -> list[bytes]:
        first = prompt * PROMPT_CHUNKS
        return [blake2b(number.to_bytes(8, "big")).digest() for number in range(first, first + PROMPT_CHUNKS)]

    def put(self, keys: list[bytes], request: int) -> None:
        for key in keys:
            self.store.put(key, CHUNK_BYTES, nothing, request=request)

    def get(self, keys: list[bytes], request: int) -> None:
        for key in keys:
            with self.store.pin_prefix([key]):
                pass

    def remove(self, keys: list[bytes], request: int) -> None:
        for key in keys:
            self.store.remove(key)

    def time(self, name: str, operation: Callable[[list[bytes], int], object], prompt: int) -> None:
        keys = self.keys(prompt)
        start = time.perf_counter()
        operation(keys, prompt)
        self.samples.setdefault(name, []).append((time.perf_counter() - start) / PROMPT_CHUNKS)

    def round(self) -> None:
        """Time one round of operations. Before and after it, the store has the latest prompts."""
        newest = self.num_prompts + len(self.samples.get("get", ()))
        prompt = random.randrange(newest - self.num_prompts // 2, newest)
        self.time("lookup", lambda keys, _: self.store.prefix(keys), prompt)
        self.time("get", self.get, prompt)
        self.time("remove", self.remove, prompt)
        self.time("put", self.put, prompt)
        self.time("put and evict", self.put, newest)

    def median(self, name: str) -> float:
        """Return the median time of an operation, in microseconds."""
        return statistics.median(self.samples[name]) * 1e6


def costs() -> Iterator[Figure]:
    stores = {size: Timed(size) for size in SIZES}
    for _ in range(ROUNDS):
        for store in stores.values():
            store.round()
    medians: dict[str, dict[int, float]] = {
        name: {size: store.median(name) for size, store in stores.items()}
        for name in ("lookup", "get", "put", "put and evict")
    }
    both = medians.pop("put and evict")
    medians["evict (put into a full tier, minus put)"] = {
        size: both[size] - medians["put"][size] for size in SIZES
    }
    for name, by_size in medians.items():
        for size, value in by_size.items():
            yield at_most(f"{name}, {size:,} chunks", value, "us", ALLOWED_MICROSECONDS)
        what, growth = f"{name}, 1 M : 10 k chunks", by_size[SIZES[-1]] / by_size[SIZES[0]]
        # A lookup is mostly a cache miss of the processor, and a larger index has more of them.
        is_bare = name == "lookup"
        yield Figure(what, growth, "x") if is_bare else at_most(what, growth, "x", ALLOWED_GROWTH)
    for size, store in stores.items():
        yield at_most(f"memory per chunk, {size:,} chunks", store.overhead_bytes, "bytes", ALLOWED_BYTES)


class FirstFit:
    """Reference allocator: places each object in the first gap that is long enough.

    If no gap is long enough, it evicts the oldest objects.
    """

    def __init__(self, num_bytes: int) -> None:
        self._gaps = [(0, num_bytes)]
        self._places: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self.payload_bytes = 0

    def put(self, number: int, length: int) -> None:
        while (index := next((i for i, gap in enumerate(self._gaps) if gap[1] >= length), None)) is None:
            _, (start, freed) = self._places.popitem(last=False)
            self.payload_bytes -= freed
            self._free(start, freed)
        start, size = self._gaps.pop(index)
        if size > length:
            insort(self._gaps, (start + length, size - length))
        self._places[number] = start, length
        self.payload_bytes += length

    def _free(self, start: int, length: int) -> None:
        insort(self._gaps, (start, length))
        merged: list[tuple[int, int]] = []
        for gap in self._gaps:
            if merged and sum(merged[-1]) == gap[0]:
                merged[-1] = merged[-1][0], merged[-1][1] + gap[1]
            else:
                merged.append(gap)
        self._gaps = merged


class Stored:
    """Objects in a ``LocalStore``. Each takes the slots that it needs, or those of a full chunk."""

    def __init__(self, num_bytes: int, *, is_full_slot: bool) -> None:
        self._store = LocalStore(NoBytes(num_bytes // SLOT_BYTES))
        self._is_full_slot = is_full_slot
        self._lengths: dict[bytes, int] = {}

    def put(self, number: int, length: int) -> None:
        key = number.to_bytes(64, "big")
        self._lengths[key] = length
        self._store.put(key, CHUNK_BYTES if self._is_full_slot else length, nothing)

    @property
    def payload_bytes(self) -> int:
        return sum(map(self._lengths.__getitem__, self._store.keys()))


def mixes() -> dict[str, list[int]]:
    """Return lists of objects' lengths, in the order of their stores."""
    with gzip.open(TRACE, "rt") as lines:
        trace = [
            json.loads(line)["input_length"] for _, line in zip(range(NUM_REQUESTS), lines, strict=False)
        ]
    draw = random.Random(4)
    tokens = {
        "trace": trace,
        "prompts of 1-1024 tokens": [draw.randint(1, 4 * CHUNK_TOKENS) for _ in range(8 * NUM_REQUESTS)],
        "tails alone": [draw.randint(1, CHUNK_TOKENS) for _ in range(16 * NUM_REQUESTS)],
    }
    per_token = CHUNK_BYTES // CHUNK_TOKENS
    return {
        name: [
            min(CHUNK_TOKENS, count - first) * per_token
            for count in counts
            for first in range(0, count, CHUNK_TOKENS)
        ]
        for name, counts in tokens.items()
    }


def shares() -> Iterator[Figure]:
    num_bytes = MIX_CHUNKS * CHUNK_BYTES
    for name, lengths in mixes().items():
        by_kind: dict[str, float] = {}
        places: dict[str, Stored | FirstFit] = {
            "a frame each": Stored(num_bytes, is_full_slot=True),
            "frames": Stored(num_bytes, is_full_slot=False),
            "first fit": FirstFit(num_bytes),
        }
        for kind, place in places.items():
            held = []
            for number, length in enumerate(lengths):
                place.put(number, length)
                if number > len(lengths) // 2 and number % 1000 == 0:
                    held.append(place.payload_bytes / num_bytes)
            by_kind[kind] = 100 * statistics.mean(held)
        for kind, share in by_kind.items():
            what = f"payload in the arena, {name}: {kind}"
            is_ours = kind == "frames"
            yield (
                at_least(what, share, "%", round(by_kind["a frame each"], 1))
                if is_ours
                else Figure(what, share, "%")
            )


def run() -> Report:
    conditions = (
        f"LocalStore without copies, prompts of {PROMPT_CHUNKS} chunks, medians of {ROUNDS} rounds over all"
        f" sizes in turn; mixes: {MIX_CHUNKS} full chunks' room, mean over the second half of the puts"
    )
    return Report("tiers", conditions, [*costs(), *shares()])
