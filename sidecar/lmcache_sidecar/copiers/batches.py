"""The copies of one GPU: a fair queue of those that wait, and the batches that the reader works on.

A **copy** fills one slot of the arena (the cache's shared memory) from GPU memory. The **reader** is the
sidecar's child process that reads one GPU over CUDA IPC and writes to the slots. A **member** is a client (a
worker of an engine) whose KV is on this GPU.

A copy is **under way** from the moment its batch is taken until that batch ends. ``GpuCopier`` ends a batch
when the reader has answered, or when the reader's process is reaped.

Members take turns, and so do the tenants of each member, one copy each. A tenant that stores long prompts
thus delays a copy of another tenant by the batches under way, and by a share of the next ones.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from lmcache_sidecar.copiers import messages
from lmcache_sidecar.copiers.jobs import CopyStats, Job, PlacedCopy
from lmcache_sidecar.copiers.members import Member
from lmcache_store.common.fair_queue import FairQueue

_MAX_BATCHES = 2
"""Batches under way at once: the reader copies one while the sidecar prepares the next one."""

_BATCH_COST = 64 << 20
"""Largest cost of a batch, in bytes."""

_PAGE_COST = 512
"""Cost of a page in addition to its bytes, in bytes that could be copied in the same time."""


class _Item(NamedTuple):
    job: Job
    position: int
    """Position among the job's slots."""
    member: int
    """Number of the member."""
    copy: PlacedCopy
    cost: int


class CopyQueue:
    """Queued copies and batches under way of one GPU. The event loop of its ``GpuCopier`` owns it."""

    def __init__(self, stats: CopyStats) -> None:
        self._stats = stats
        self._waiting: OrderedDict[int, FairQueue[_Item]] = OrderedDict()  # by member, the next one first
        self._batches: dict[int, list[_Item]] = {}  # under way
        self._batch_numbers = itertools.count(1)

    @property
    def num_slots_under_way(self) -> int:
        """Slots that the reader may be writing to."""
        return sum(map(len, self._batches.values()))

    def put(self, member: Member, copies: Sequence[PlacedCopy]) -> Job:
        """Queue copies of one member and return their job."""
        job = Job(len(copies), [False] * len(copies), asyncio.get_running_loop().create_future())
        for position, copy in enumerate(copies):
            num_bytes, num_pages = member.row_costs[copy.group]
            cost = num_bytes + num_pages * _PAGE_COST
            item = _Item(job, position, member.number, copy, cost)
            self._waiting.setdefault(member.number, FairQueue()).put(copy.tenant, (item,))
        return job

    def drop(self, number: int, reason: str, job: Job | None = None) -> None:
        """Drop a member's queued copies: those of one job, or all. Copies under way continue."""
        waiting = self._waiting.pop(number, FairQueue())
        for tenant in waiting.clients:
            for item in waiting.drop(tenant, lambda item: job in (None, item.job)):
                item.job.refusal = item.job.refusal or reason
                item.job.note_end(item.position, is_copied=False)
        if waiting:
            self._waiting[number] = waiting

    def take_batch(self) -> tuple[int, bytes] | None:
        """Return the number of a new batch, and the body of the message COPY that sends it to the reader.

        The batch is under way from now on. Returns None if nothing waits, or if enough batches are under way.
        """
        if not self._waiting or len(self._batches) >= _MAX_BATCHES:
            return None
        number = next(self._batch_numbers)
        items = self._batches[number] = self._take()
        self._stats.copy_batches += 1
        return number, messages.pack_copies(_grouped(items))

    def _take(self) -> list[_Item]:
        """Take items of the members in turn: at least one, and more while they fit into a batch."""
        taken: list[_Item] = []
        left = _BATCH_COST
        while self._waiting:
            member, waiting = next(iter(self._waiting.items()))
            left -= waiting.next_item.cost
            if taken and left < 0:
                break
            taken.append(waiting.take_next())
            self._waiting.move_to_end(member)
            if not waiting:
                del self._waiting[member]
        return taken

    def end_batch(self, number: int, refusal: str = "") -> None:
        """Finish a batch; a ``refusal`` says why its slots were not filled."""
        for item in self._batches.pop(number, ()):
            if refusal:
                self._stats.failed_slots += 1
                item.job.refusal = item.job.refusal or refusal
            else:
                self._stats.copied_slots += 1
            item.job.note_end(item.position, is_copied=not refusal)

    def end_all(self, refusal: str) -> set[int]:
        """Finish all batches as not filled. Returns the numbers of the members that had copies under way."""
        members = {item.member for items in self._batches.values() for item in items}
        for number in list(self._batches):
            self.end_batch(number, refusal)
        return members


def _grouped(items: Iterable[_Item]) -> list[messages.Copies]:
    """Combine the items of each member and KV group."""
    groups: defaultdict[tuple[int, int], list[PlacedCopy]] = defaultdict(list)
    for item in items:
        groups[item.member, item.copy.group].append(item.copy)
    return [
        messages.Copies(
            member, group, np.array([c.offset for c in copies], "<u8"), np.stack([c.blocks for c in copies])
        )
        for (member, group), copies in groups.items()
    ]
