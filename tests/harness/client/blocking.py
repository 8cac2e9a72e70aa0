"""One rank of an engine that stores and loads whole pages on threads, over a real sidecar.

Its pages are plain host memory. The bytes of a page follow from its hash, its KV group, its column and the
weights that computed it, so a load of a wrong page is always noticed.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from lmcache_client.core.copier import CpuCopier, RowLoad
from lmcache_client.core.jobs import EngineIdentity
from lmcache_client.core.layout import Layout
from lmcache_client.core.paged.blocking import BlockingAccess, Limits, PagedRequest
from lmcache_client.rpc.client import SidecarClient
from lmcache_client.rpc.hello import ClientHello, Role
from lmcache_client.rpc.session import SidecarSession
from lmcache_store.common.timing import TIMING, Timing
from lmcache_store.kv_groups import GroupKind, KVGroup
from testing.processes import SidecarProcess
from tests.harness.sidecar.wire import NAMESPACE as NAMESPACE
from tests.harness.sidecar.wire import attached, make_hello, usable

PAGE_TOKENS = 64
NUM_LAYERS = 3
LAYER_BYTES = 5_000
PAGE_BYTES = NUM_LAYERS * LAYER_BYTES
NUM_PAGES = 96
TIMEOUT = 60.0

PATIENT = Limits(lookup_seconds=TIMEOUT, row_seconds=TIMEOUT, load_seconds=TIMEOUT, lease_seconds=3600.0)
"""Limits that no operation reaches on a slow machine."""

_FILLERS = itertools.count(1_000_000)


@pytest.fixture
def patient_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls of the access take a minute: a sidecar may get no processor for seconds."""
    monkeypatch.setattr(TIMING, "lookup_seconds", TIMEOUT)


@pytest.fixture
def usual_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls end after the same time as in an engine."""
    monkeypatch.setattr(TIMING, "call_seconds", Timing.call_seconds)


def hash_of(number: int) -> bytes:
    """The engine's hash of a page."""
    return hashlib.sha256(b"page %d" % number).digest()


def hashes_of(numbers: Sequence[int]) -> list[bytes]:
    return list(map(hash_of, numbers))


def content(number: int, group: int = 0, column: int = 0, weights: object = 0) -> np.ndarray:
    """The KV of a page ``[layers, bytes]``."""
    seed = hashlib.sha256(repr((number, group, column, weights)).encode()).digest()
    random = np.random.default_rng(np.frombuffer(seed, np.uint64))
    return random.integers(0, 256, (NUM_LAYERS, LAYER_BYTES), np.uint8)


class Gate:
    """Holds a thread at a point in a copy, so that a test can act meanwhile."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self._opened.wait(TIMEOUT)

    def wait(self) -> None:
        """Wait until a thread stands at the gate."""
        assert self.reached.wait(TIMEOUT)

    def open(self) -> None:
        self._opened.set()


def nothing() -> None:
    """The hooks of a copier that no test uses."""


class HookedCopier(CpuCopier):
    """Copies pages one by one, and calls a hook of the test before or after each copy."""

    batch_bytes = 0

    def __init__(self, layouts: dict[int, Layout], num_threads: int) -> None:
        super().__init__(layouts, num_threads)
        self.before_load: Callable[[], None] = nothing
        self.after_load: Callable[[], None] = nothing
        self.before_store: Callable[[], None] = nothing
        self.after_store: Callable[[], None] = nothing
        self.num_loads = 0

    def load(self, rows: Sequence[RowLoad], fence: Any) -> None:
        self.num_loads += 1
        self.before_load()
        super().load(rows, fence)
        self.after_load()

    def store(self, group: int, slot: Any, blocks: Sequence[int], fence: Any) -> None:
        self.before_store()
        super().store(group, slot, blocks, fence)
        self.after_store()


class PageEngine:
    """A rank with ``NUM_PAGES`` pages in each KV group; a context manager.

    ``window_pages``: the last KV group has a sliding window; ``hello``: other fields of its Hello.
    """

    def __init__(
        self,
        sidecar: SidecarProcess,
        limits: Limits = PATIENT,
        *,
        num_groups: int = 1,
        window_pages: int = 0,
        column: int = 0,
        num_columns: int = 1,
        num_threads: int = 1,
        **hello: Any,
    ) -> None:
        self.sidecar, self.column, self.num_groups = sidecar, column, num_groups
        self.weights: object = 0
        self.memory = {
            group: torch.zeros((NUM_LAYERS, NUM_PAGES, LAYER_BYTES), dtype=torch.uint8)
            for group in range(num_groups)
        }
        self.copier = HookedCopier(
            {group: Layout(tuple(memory), 1) for group, memory in self.memory.items()}, num_threads
        )
        self.hello = self._make_hello(num_columns, window_pages, hello)
        self.client = SidecarClient(sidecar.socket_path, self.hello)
        self.client.start()
        self.access = BlockingAccess(
            self.client, EngineIdentity(self.hello, PAGE_TOKENS), self.copier, limits
        )
        self._next_page = 0

    def __enter__(self) -> PageEngine:
        attached(self.client)
        usable(self.sidecar)
        return self

    def __exit__(self, *_: object) -> None:
        self.access.close()

    def _make_hello(self, num_columns: int, window_pages: int, fields: dict[str, Any]) -> ClientHello:
        groups = [KVGroup(group, PAGE_TOKENS, PAGE_BYTES) for group in range(self.num_groups)]
        if window_pages:
            window = window_pages * PAGE_TOKENS, GroupKind.SLIDING_WINDOW
            groups[-1] = KVGroup(self.num_groups - 1, PAGE_TOKENS, PAGE_BYTES, *window)
        defaults = {"chunk_tokens": PAGE_TOKENS, "groups": tuple(groups), "namespace": NAMESPACE}
        return make_hello(Role.WORKER, num_columns=num_columns, column=self.column, **(defaults | fields))

    def pages(self, count: int) -> list[int]:
        """Pages that no running operation uses, if it has fewer than a third of all pages."""
        if self._next_page + count > NUM_PAGES:
            self._next_page = 0
        self._next_page += count
        return list(range(self._next_page - count, self._next_page))

    def read(self, page: int, group: int = 0) -> np.ndarray:
        return self.memory[group][:, page].numpy()

    def fill(self, pages: Sequence[int], numbers: Sequence[int], group: int = 0) -> None:
        """Compute the KV of pages."""
        for page, number in zip(pages, numbers, strict=True):
            self.read(page, group)[...] = content(number, group, self.column, self.weights)

    def expected(self, number: int, group: int = 0) -> np.ndarray:
        return content(number, group, self.column, self.weights)

    def store(self, *numbers: int, prefix: Sequence[int] = (), groups: Sequence[int] | None = None) -> bool:
        """Compute pages and store them in all groups. Returns whether all are cached."""
        results = []
        for group in self.memory if groups is None else groups:
            pages = self.pages(len(numbers))
            self.fill(pages, numbers, group)
            results.append(self.access.store(group, hashes_of(numbers), pages, hashes_of(prefix)))
        return all(results)

    def look_up(self, *numbers: int) -> int:
        return self.access.count_hits(hashes_of(numbers))

    def load(self, *numbers: int, group: int = 0) -> int:
        """Load pages. Compares the pages that were loaded, and all pages that must not change."""
        pages = self.pages(len(numbers))
        for page in pages:
            self.read(page, group)[...] = 0xEE
        untouched = [page for page in range(NUM_PAGES) if page not in pages]
        before = self.memory[group][:, untouched].clone()
        num_loaded = self.access.load(group, hashes_of(numbers), pages)
        assert 0 <= num_loaded <= len(numbers)
        for page, number in zip(pages[:num_loaded], numbers, strict=False):
            assert np.array_equal(self.read(page, group), self.expected(number, group)), f"page {number}"
        assert torch.equal(before, self.memory[group][:, untouched]), "a load wrote to another page"
        return num_loaded

    def run(self, *numbers: int) -> int:
        """Look pages up and load what was found, as an engine does. Returns how many were loaded."""
        num_hits = self.look_up(*numbers)
        if not num_hits:
            return 0
        return min(self.load(*numbers[:num_hits], group=group) for group in self.memory)

    def report(self, *numbers: int, num_engine: int, num_loaded: int, num_more_tokens: int = 0) -> None:
        """Report a prompt of these pages: how many leading ones the engine has, and how many it loaded."""
        request = PagedRequest(
            lambda: hashes_of(numbers),
            len(numbers) * PAGE_TOKENS + num_more_tokens,
            num_engine * PAGE_TOKENS,
            num_loaded * PAGE_TOKENS,
        )
        self.access.report(request)
        self.settle()

    def evict(self, *other_ranks: PageEngine) -> None:
        """Evict all rows that are not in use: store as many filler rows as there are slots.

        ``other_ranks``: the engine's other ranks. A row that one of them lacks is not evicted for a while.
        """
        # A row can't be evicted before the sidecar has its checksum.
        stats = self.sidecar.wait_until(lambda stats: stats if not stats["num_unwritten_rows"] else None)
        for number in itertools.islice(_FILLERS, stats["memory"]["usable_rows"]):
            for rank in (self, *other_ranks):
                session = rank.client.session
                assert session is not None
                with session.copying():
                    (answer,) = session.reserve(0, b"f" * 32 + hash_of(number))
                    if answer.slot is not None:
                        session.commit([answer.slot])

    def settle(self) -> None:
        """Wait until all releases and reports so far have been sent."""
        done = threading.Event()
        self.access._tasks.put(done.set)
        assert done.wait(TIMEOUT)


def wait_released(sidecar: SidecarProcess) -> None:
    """Wait until no row is leased."""
    sidecar.wait_until(lambda stats: stats["memory"]["leased_rows"] == 0)


def wait_leased(sidecar: SidecarProcess, num_rows: int) -> None:
    sidecar.wait_until(lambda stats: stats["memory"]["leased_rows"] == num_rows)


class Started:
    """A call on a thread of its own. ``result`` waits for it, and raises what it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._future: Future[Any] = Future()
        threading.Thread(target=self._run, args=(call,), daemon=True).start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._future.set_result(call())
        except BaseException as error:
            self._future.set_exception(error)

    def result(self) -> Any:
        return self._future.result(TIMEOUT)


def reattached(engine: PageEngine, before: SidecarSession) -> SidecarSession:
    """Wait for a session after ``before`` whose rows can all be used."""
    session = attached(engine.client, newer_than=before)
    usable(engine.sidecar)
    return session
