"""Causes of three workloads, compared with a model that remembers everything.

The sidecar's records are bounded and use 64 bits of each key. The model has none of these limits.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_sidecar.explain.causes import Causes, UncountedRequest, find_blocking
from lmcache_sidecar.explain.sources import find_sources
from lmcache_store.kv_groups import KVGroup
from lmcache_store.tiers.memory.contracts import Chains
from lmcache_store.tiers.tiered.absences import Absence
from lmcache_store.tiers.tiered.history import ChunkHistory, chunk_names
from testing.workloads.requests import TOKENS, agents
from testing.workloads.tiers import Rows
from tools.simulate import read_trace

TRACES = Path(__file__).parents[3] / "benchmarks" / "traces"
GROUP = KVGroup(0, 16, 1 << 20)


def trace(name: str) -> list[tuple[int, ...]]:
    requests = read_trace(TRACES / f"mooncake_{name}_trace.jsonl.gz")
    return [request.blocks for request in requests if request.blocks]


WORKLOADS = {
    "conversation": lambda: trace("conversation"),
    "synthetic": lambda: trace("synthetic"),
    "agents": lambda: [request.keys for request in agents(1.0, 0.5).requests],
}


class Exact:
    """The causes of a workload with an LRU memory tier of some rows, from sets without bounds."""

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        self._known: set[int] = set()
        self._following: dict[int, int] = {}

    def count(self, blocks: Sequence[int], num_hit: int) -> None:
        """Count a request whose leading ``num_hit`` blocks are in memory."""
        num_known = next((i for i, block in enumerate(blocks) if block not in self._known), len(blocks))
        has_next = 0 < num_known < len(blocks) and blocks[num_known - 1] in self._following
        has_diverged = has_next and self._following[blocks[num_known - 1]] != blocks[num_known]
        self.tokens["memory"] += num_hit * TOKENS
        self.tokens["evicted"] += (num_known - num_hit) * TOKENS
        self.tokens["diverged" if has_diverged else "new"] += (len(blocks) - num_known) * TOKENS
        self._known.update(blocks)
        self._following.update(pairwise(blocks))


class Counted:
    """The causes of the same workload, as a sidecar counts them. Its history holds ``num_sets`` sets."""

    def __init__(self, num_sets: int) -> None:
        self.causes = Causes(lambda seconds, action: None)
        self._history = ChunkHistory(num_sets)
        self._keys: dict[int, bytes] = {}

    def count(self, blocks: Sequence[int], num_hit: int) -> None:
        """Count a request whose leading ``num_hit`` blocks are in memory. It then stores the others."""
        keys = [self._key(block) for block in blocks]
        chains = Chains(TOKENS, (GROUP,), (keys,))
        message = pb.Scheduled(
            num_hit_chunks=num_hit,
            num_loaded_tokens=num_hit * TOKENS,
            num_prompt_tokens=len(blocks) * TOKENS,
        )
        sources, is_stored = find_sources(chains, message, {}), self._history.is_stored
        blocking = find_blocking(chains, num_hit, "r", self._absence, is_stored)
        # A whole hour passes, so that no chunk counts as being stored.
        time = 3600.0 * (1 + len(self.causes.requests))
        self.causes.note(UncountedRequest(time, "r", chains, message, sources, self._history, blocking))
        self.causes.settle()
        self._history.note_stored(chunk_names(keys[num_hit:]))

    def _key(self, block: int) -> bytes:
        key = self._keys.get(block)
        if key is None:
            key = self._keys[block] = b"n" * 32 + hashlib.sha256(b"%d" % block).digest()
        return key

    def _absence(self, key: bytes, request: str) -> Absence:
        return Absence.EVICTED if self._history.is_stored(key) else Absence.NOT_STORED


def shares(tokens: Counter[str]) -> dict[str, float]:
    return {cause: 100 * number / tokens.total() for cause, number in tokens.items() if number}


def working_set(requests: Iterable[Sequence[int]]) -> int:
    return len({block for blocks in requests for block in blocks})


def shares_of(requests: Sequence[Sequence[int]], num_sets: int) -> tuple[dict[str, float], dict[str, float]]:
    """Exact and counted shares of the causes in per cent, with a memory tier of half the working set."""
    memory = Rows(working_set(requests) // 2)
    exact, counted = Exact(), Counted(num_sets)
    for blocks in requests:
        num_hit = memory.run(blocks)
        exact.count(blocks, num_hit)
        counted.count(blocks, num_hit)
        memory.touch(blocks)
    return shares(exact.tokens), shares(counted.causes.stats.cause_tokens)


@pytest.mark.parametrize("name", WORKLOADS)
def test_shares_of_causes_are_within_a_point_of_an_exact_model(name):
    exact, counted = shares_of(WORKLOADS[name](), num_sets=1 << 17)
    assert exact.keys() >= {"memory", "new", "evicted", "diverged"}
    assert counted == pytest.approx(exact, abs=1.0)
