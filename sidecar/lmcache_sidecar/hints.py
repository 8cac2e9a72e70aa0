"""Decisions about hints: what a sidecar retains, fetches and lets go, and the bound that clipped it.

The budget of retained rows is that of the tenant (``RowHints.limits``). Prefetches are bounded as all
promotions are, and in number.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_store.common.recent import Recent
from lmcache_store.common.units import ceil_div
from lmcache_store.hints import HintAction, HintDecision, HintKind, HintOutcome
from lmcache_store.tiers.memory.contracts import Chains
from lmcache_store.tiers.memory.holds import Hold
from lmcache_store.tiers.memory.tier import MemoryTier
from lmcache_store.tiers.stats import counter, counters
from lmcache_store.tiers.tiered.store import TieredStore

_MAX_ANSWERS = 1024
_MAX_PREFETCHES, _MAX_TENANT_PREFETCHES = 64, 8


class Retained(NamedTuple):
    """The rows that one action of one request retains now."""

    tenant: str
    """Name of the tenant's budget."""
    message_id: str
    action_id: str
    request_id: str
    num_rows: int
    num_bytes: int
    num_tokens: int
    priority: int
    seconds_left: float
    saved_tokens: int
    """Prompt tokens that hit only because of the hint."""


@dataclass
class HintStats:
    """Counters of hints."""

    actions: Counter[str] = counters("action outcome", "Actions of hints, by what became of them")
    saved_tokens: int = counter("Prompt tokens that hit in rows that memory would have evicted without hints")
    unused: int = counter("Actions that retained rows until their end without a saved token")
    evicted_rows: int = counter("Retained rows that memory had to evict before their end")


class HintedPrompt(NamedTuple):
    """The prompt of a request with hints."""

    request_id: str
    message_id: str
    engine: bytes
    chains: Chains
    namespace: bytes

    def end_chunk(self, action: HintAction) -> int:
        """Return the number of whole chunks up to the end of the action's range."""
        num_chunks = self.chains.num_chunks
        return (
            min(action.end_token // self.chains.chunk_tokens, num_chunks) if action.end_token else num_chunks
        )


class HintBoard:
    """Decides about hints, and executes them on the store. Belongs to the event loop."""

    def __init__(self, max_ttl_seconds: float) -> None:
        self.max_ttl_seconds = max_ttl_seconds
        self.answers: Recent[str, Sequence[pb.HintDecision]] = Recent(_MAX_ANSWERS)
        """Replies that ``ReadHints`` has not read yet, by their ids."""
        self._counts = HintStats()
        self._memory: MemoryTier | None = None  # of the last call
        self._prefetches: dict[asyncio.Task[None], bytes] = {}  # tenants by running prefetch

    @property
    def stats(self) -> HintStats:
        """Counters since the start."""
        present = self._present
        return replace(
            self._counts,
            saved_tokens=self._counts.saved_tokens + sum(hold.saved_tokens for hold in present),
            evicted_rows=self._counts.evicted_rows + sum(hold.num_evicted for hold in present),
        )

    def retained(self) -> list[Retained]:
        """Return what hints retain now, the latest first."""
        if (memory := self._memory) is None:
            return []
        now, budgets = memory.hints.now(), memory.stats.tenants.budgets
        return [
            Retained(
                budgets.of(hold.tenant).name,
                hold.message_id,
                hold.action_id,
                hold.request_id,
                len(hold.keys),
                hold.num_slots * memory.bytes_per_slot,
                round(len(hold.keys) * hold.tokens_per_row),
                hold.priority,
                hold.expires_at - now,
                hold.saved_tokens,
            )
            for hold in reversed(self._present)
        ]

    async def apply(
        self, actions: Sequence[HintAction], prompt: HintedPrompt, store: TieredStore
    ) -> list[HintDecision]:
        """Execute the actions of a request. Return a decision for each of them.

        An action takes up to 20 ms, for a prompt of 4,096 chunks. Other calls go first after each of them.
        """
        self._follow(store.memory)
        decisions = []
        for action in actions:
            await asyncio.sleep(0)
            if store.is_closed:
                decision = HintDecision(action.action_id, HintOutcome.DEFERRED, "the cache is being replaced")
            elif not prompt.chains.num_chunks:
                decision = _refused(action, "the prompt has no whole chunk of tokens that is cached")
            elif action.kind is HintKind.RETAIN:
                decision = self._retain(action, prompt, store)
            elif action.kind is HintKind.PREFETCH:
                decision = self._prefetch(action, prompt, store)
            else:
                decision = _release(action, prompt, store.memory)
            self._counts.actions[f"{action.kind.value} {decision.outcome.value}"] += 1
            decisions.append(decision)
        return decisions

    @property
    def _present(self) -> list[Hold]:
        return [] if self._memory is None else self._memory.hints.holds.present

    def _follow(self, memory: MemoryTier) -> None:
        """Count the holds of this memory tier. After a change of the arena's format, it is a new one."""
        if memory is not self._memory:
            for hold in self._present:
                self._count(hold)
            self._memory = memory
            memory.hints.holds.on_end = self._count

    def _count(self, hold: Hold) -> None:
        self._counts.saved_tokens += hold.saved_tokens
        self._counts.evicted_rows += hold.num_evicted
        self._counts.unused += not hold.num_saved

    def _retain(self, action: HintAction, prompt: HintedPrompt, store: TieredStore) -> HintDecision:
        chains, hints = prompt.chains, store.memory.hints
        num_asked, limit = prompt.end_chunk(action), hints.max_retained(chains.tenant)
        if not num_asked:
            return _refused(action, f"a chunk has {chains.chunk_tokens} tokens: retain at least one")
        seconds = min(action.ttl_seconds, self.max_ttl_seconds)
        hold = Hold(
            chains.tenant,
            prompt.request_id,
            prompt.message_id,
            action.action_id,
            hints.now() + seconds,
            action.priority,
            tokens_per_row=chains.chunk_tokens / len(chains.groups),
        )
        room = min(limit, hints.holds.room(chains.tenant, hold.rank, hints.max_named(chains.tenant)))
        slots = [store.memory.num_slots(group.chunk_bytes) for group in chains.groups]
        num_fitting = _num_fitting(chains, slots, num_asked, room)
        bounds = []
        if num_fitting < num_asked:
            bounds.append("retainPercent" if room == limit else "what other hints of the tenant retain")
        if not num_fitting:
            return _refused(action, f"nothing is left by {bounds[0]}")
        if seconds < action.ttl_seconds:
            bounds.append("maxTtlSeconds")
        keys = [(chains.key(place), slots[place[1]]) for place in chains.places(num_fitting)]
        store.retain(hold, keys, is_open=not action.end_token and num_fitting == num_asked)
        return _executed(action, num_fitting * chains.chunk_tokens, bounds, seconds)

    def _prefetch(self, action: HintAction, prompt: HintedPrompt, store: TieredStore) -> HintDecision:
        num_chunks, chunk_tokens = prompt.end_chunk(action), prompt.chains.chunk_tokens
        if not num_chunks:
            return _refused(action, f"a chunk has {chunk_tokens} tokens: prefetch at least one")
        keys = tuple(keys[:num_chunks] for keys in prompt.chains.keys)
        chains = replace(prompt.chains, keys=keys)
        lease_id = prompt.engine, f"{prompt.request_id} prefetch"
        found = store.lookup(lease_id, chains, is_hint=True, is_counted=False)
        if found.num_resident < num_chunks:
            if store.is_memory_only(prompt.namespace):
                return _refused(action, "no other tier can have more of this prompt")
            running = list(self._prefetches.values())
            if len(running) >= _MAX_PREFETCHES or running.count(chains.tenant) >= _MAX_TENANT_PREFETCHES:
                return _refused(action, "too many prefetches are running: send this one again later")
            task = store.prefetch(lease_id, chains)
            self._prefetches[task] = chains.tenant
            task.add_done_callback(self._prefetches.pop)
        return _executed(action, num_chunks * chunk_tokens, [])


def _release(action: HintAction, prompt: HintedPrompt, memory: MemoryTier) -> HintDecision:
    chunk_tokens = prompt.chains.chunk_tokens
    chunks = range(ceil_div(action.begin_token, chunk_tokens), prompt.end_chunk(action))
    if not chunks:
        return _refused(action, f"these tokens have no whole chunk of {chunk_tokens} tokens")
    memory.evict_first([keys[chunk] for chunk in chunks for keys in prompt.chains.keys])
    return _executed(action, len(chunks) * chunk_tokens, [])


def _num_fitting(chains: Chains, slots: Sequence[int], num_chunks: int, room: int) -> int:
    """Return how many of the leading chunks have rows that fit into ``room`` slots."""

    def num_slots(number: int) -> int:
        return sum(slots[group] for _, group in chains.places(number))

    if chains.is_prefix:
        return min(num_chunks, room // slots[0])
    return bisect.bisect_right(range(1, num_chunks + 1), room, key=num_slots)


def _refused(action: HintAction, reason: str) -> HintDecision:
    return HintDecision(action.action_id, HintOutcome.REFUSED, reason)


def _executed(
    action: HintAction, num_tokens: int, bounds: Sequence[str], seconds: float = 0.0
) -> HintDecision:
    outcome = HintOutcome.CLIPPED if bounds else HintOutcome.ACCEPTED
    reason = f"bounded by {' and by '.join(bounds)}" if bounds else ""
    return HintDecision(action.action_id, outcome, reason, num_tokens, seconds)
