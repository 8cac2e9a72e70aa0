"""Random orders of lookups, loads, stores, evictions, renames and restarts, with a real sidecar.

The bytes of a page follow from its hash, the column and the weights of its namespace. So each load checks
that it got exactly the page that it asked for. At the end no row is leased.
"""

import os
from unittest import mock

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from lmcache_store.common.timing import TIMING
from testing.processes import SidecarProcess
from tests.harness.client import blocking
from tests.harness.client.blocking import PageEngine, reattached, wait_released
from tests.harness.scope import examples
from tests.harness.sidecar.wire import usable

NUM_EXAMPLES = examples(6)
NUM_NUMBERS = 12
firsts = st.integers(0, NUM_NUMBERS - 1)
lengths = st.integers(1, 6)
ranks = st.integers(0, 1)
groups = st.integers(0, 1)


class Pages(RuleBasedStateMachine):
    """Two ranks of one engine, with two KV groups. A page is visible when both ranks have stored it."""

    sidecar: SidecarProcess

    @initialize()
    def begin(self):
        self.patch = mock.patch.object(TIMING, "lookup_seconds", blocking.TIMEOUT)
        self.patch.start()
        self.sidecar.wait_until(lambda stats: not stats["clients"])
        self.namespaces = [os.urandom(32) for _ in range(2)]
        self.ranks = [
            PageEngine(self.sidecar, column=column, num_columns=2, num_groups=2, namespace=self.namespaces[0])
            for column in range(2)
        ]
        for rank in self.ranks:
            rank.__enter__()
        self.rename(0)
        # Ranks that stored a page, by (namespace, group, number). A page may have been evicted since.
        self.stored: dict[tuple[int, int, int], set[int]] = {}

    def numbers(self, first, length):
        return range(first, min(NUM_NUMBERS, first + length))

    def may_hold(self, group, numbers):
        """How many leading pages can be visible."""
        count = 0
        for number in numbers:
            if len(self.stored.get((self.present, group, number), ())) < 2:
                break
            count += 1
        return count

    @rule(rank=ranks, group=groups, first=firsts, length=lengths)
    def store(self, rank, group, first, length):
        numbers = self.numbers(first, length)
        if self.ranks[rank].store(*numbers, prefix=range(first), groups=[group]):
            for number in numbers:
                self.stored.setdefault((self.present, group, number), set()).add(rank)

    @rule(first=firsts, length=lengths)
    def store_everywhere(self, first, length):
        for rank in range(2):
            for group in range(2):
                self.store(rank, group, first, length)

    @rule(rank=ranks, first=firsts, length=lengths)
    def look_up(self, rank, first, length):
        numbers = self.numbers(first, length)
        num_hits = self.ranks[rank].look_up(*numbers)
        assert num_hits <= min(self.may_hold(group, numbers) for group in range(2))

    @rule(rank=ranks, group=groups, first=firsts, length=lengths)
    def load(self, rank, group, first, length):
        """Loads compare the bytes of each page that they deliver."""
        numbers = self.numbers(first, length)
        assert self.ranks[rank].load(*numbers, group=group) <= self.may_hold(group, numbers)

    @rule(rank=ranks, first=firsts, length=lengths)
    def run(self, rank, first, length):
        """Rows that a lookup found stay until they are loaded."""
        numbers = self.numbers(first, length)
        num_hits = self.ranks[rank].look_up(*numbers)
        if num_hits:
            for group in range(2):
                assert self.ranks[rank].load(*numbers[:num_hits], group=group) == num_hits

    @rule()
    def evict(self):
        self.ranks[0].evict(self.ranks[1])

    @rule(number=st.integers(0, 1))
    def rename(self, number):
        """New weights for both ranks. The old weights may come back."""
        self.present = number
        for rank in self.ranks:
            rank.access.set_namespace(self.namespaces[number])
            rank.weights = number

    @rule()
    def rename_to_nothing(self):
        for rank in self.ranks:
            rank.access.set_namespace(None)
            assert rank.look_up(*range(NUM_NUMBERS)) == 0
            assert rank.load(*range(NUM_NUMBERS)) == 0
            assert not rank.store(0)
        self.rename(self.present)

    @rule(is_due=st.sampled_from([True, False, False]))
    def restart(self, is_due):
        if not is_due:  # a restart takes seconds
            return
        sessions = [rank.client.session for rank in self.ranks]
        self.sidecar.restart()
        for rank, session in zip(self.ranks, sessions, strict=True):
            reattached(rank, session)

    @rule()
    def restart_engine(self):
        """A rank's client ends and begins again, as when SGLang detaches its backend."""
        self.ranks[1].access.close()
        self.ranks[1] = PageEngine(
            self.sidecar, column=1, num_columns=2, num_groups=2, namespace=self.namespaces[0]
        )
        self.ranks[1].__enter__()
        self.rename(self.present)

    def teardown(self):
        if not hasattr(self, "ranks"):
            return
        try:
            for rank in self.ranks:
                rank.access.set_namespace(None)
                rank.settle()
            wait_released(self.sidecar)
            usable(self.sidecar)
        finally:
            for rank in self.ranks:
                rank.access.close()
            self.patch.stop()


Pages.TestCase.settings = settings(
    max_examples=NUM_EXAMPLES, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


class TestPages(Pages.TestCase):  # type: ignore[valid-type]  # Hypothesis makes the class
    @classmethod
    def setUpClass(cls):
        Pages.sidecar = SidecarProcess(memory_size="2Mi")
        Pages.sidecar.__enter__()

    @classmethod
    def tearDownClass(cls):
        Pages.sidecar.__exit__(None, None, None)
