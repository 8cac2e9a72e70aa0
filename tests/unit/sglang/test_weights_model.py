"""A model of engines whose weights change: KV of one state of weights is never found in another."""

import itertools

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmcache_client.sglang.weights import _UPDATES, WeightWatch
from tests.harness.scope import examples
from tests.harness.sglang.weights import NAMESPACE, UpdateError, installed, make_classes


class Rank:
    """A rank of SGLang with its caches. A page is the set of weights that its KV depends on."""

    def __init__(self, storage, engine_uuid):
        self.storage, self.weights, self.uuid = storage, "start", engine_uuid
        self.cached: list[frozenset[str]] = []
        self.queued: list[frozenset[str]] = []
        self.namespace: bytes | None = None
        watch = WeightWatch()
        updater_class, controller_class = make_classes()
        installed(watch, updater_class, controller_class)
        self.watch, self.updater, self.controller = watch, updater_class(self), controller_class(self)
        self.flush_fails = False
        self.attach()

    def attach(self):
        def rename():
            self.namespace = self.watch.name(NAMESPACE, self.uuid)

        self.detach = self.watch.subscribe(rename)

    def apply(self, weights, *, fails):
        self.weights = f"{weights} in part" if fails else weights
        if fails:
            raise UpdateError

    def begin(self):
        pass

    def end(self, run_post_load):
        pass

    def reset(self):
        if self.flush_fails:
            raise UpdateError
        self.cached.clear()
        self.queued.clear()

    def compute(self):
        """Compute a page, whose KV depends on that of the pages before it."""
        page = frozenset({self.weights}).union(*self.cached)
        self.cached.append(page)
        self.queued.append(page)

    def back_up(self):
        for page in self.queued:
            if self.namespace is not None:
                self.storage.setdefault(self.namespace, []).append(page)
        self.queued.clear()

    def find(self):
        stored = self.storage.get(self.namespace, []) if self.namespace is not None else []
        assert all(page == {self.weights} for page in stored), (self.weights, stored)
        self.cached += stored


ranks = st.integers(0, 1)


class Engines(RuleBasedStateMachine):
    """Two engines with the same model share a cache. Each is updated in any order."""

    def __init__(self):
        super().__init__()
        self.storage: dict[bytes, list[frozenset[str]]] = {}
        self.numbers = itertools.count()
        self.ranks = [self.make_rank(), self.make_rank()]

    def make_rank(self):
        return Rank(self.storage, b"%016d" % next(self.numbers))

    @rule(rank=ranks)
    def compute(self, rank):
        self.ranks[rank].compute()

    @rule(rank=ranks)
    def back_up(self, rank):
        self.ranks[rank].back_up()

    @rule(rank=ranks)
    def store_cached_pages(self, rank):
        """SGLang stores a page again if it was used often."""
        self.ranks[rank].queued += self.ranks[rank].cached

    @rule(rank=ranks)
    def find(self, rank):
        self.ranks[rank].find()

    @rule(rank=ranks, method=st.sampled_from(_UPDATES), fails=st.booleans(), flushes=st.booleans())
    def update(self, rank, method, fails, flushes):
        engine = self.ranks[rank]
        weights = f"weights {next(self.numbers)}"
        try:
            getattr(engine.updater, method)(weights, fails=fails)
        except UpdateError:
            assert fails
        if flushes and not fails:
            engine.controller.reset()

    @rule(rank=ranks)
    def begin(self, rank):
        self.ranks[rank].updater.begin_weight_update()

    @rule(rank=ranks)
    def end(self, rank):
        self.ranks[rank].updater.end_weight_update(run_post_load=False)

    @rule(rank=ranks, fails=st.booleans())
    def flush(self, rank, fails):
        engine = self.ranks[rank]
        engine.flush_fails = fails
        try:
            engine.controller.reset()
        except UpdateError:
            assert fails
        engine.flush_fails = False

    @rule(rank=ranks)
    def forget(self, rank):
        self.ranks[rank].watch.forget_all()

    @rule(rank=ranks)
    def attach_again(self, rank):
        self.ranks[rank].detach()
        self.ranks[rank].namespace = None
        self.ranks[rank].attach()

    @rule(rank=ranks)
    def restart(self, rank):
        self.ranks[rank] = self.make_rank()

    @precondition(lambda self: not any(rank.watch._num_open_updates for rank in self.ranks))
    @rule()
    def flush_all(self):
        """The cache is open again after a flush, if no update is open."""
        for rank in self.ranks:
            rank.controller.reset()
            assert rank.namespace is not None

    @invariant()
    def each_rank_uses_the_present_name(self):
        for rank in self.ranks:
            assert rank.namespace == rank.watch.name(NAMESPACE, rank.uuid)
            rank.find()


Engines.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40)
test_no_kv_of_other_weights_is_found = Engines.TestCase
