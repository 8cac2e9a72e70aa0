"""Random orders of requests, faults, resets and restarts under vLLM's own tiering manager.

The tier never offers a wrong byte, reports every job once, and leaves no row held. Threads do its work in any
order: no check depends on the time.
"""

import threading
from unittest import mock

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

from hypothesis import HealthCheck, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule  # noqa: E402
from vllm.v1.kv_offload.base import LookupResult  # noqa: E402

from lmcache.engines.vllm.tier_settings import TierSettings  # noqa: E402
from lmcache.tiers.base import Health, Loaded  # noqa: E402
from lmcache.tiers.errors import TierUnavailableError  # noqa: E402
from testing.deadlines import CALLS  # noqa: E402
from tests.harness.offloading_world import PATIENT, TIMEOUT, OffloadingWorld, key_of  # noqa: E402
from tests.harness.scope import examples  # noqa: E402

DEADLINES = CALLS

NUM_KEYS, NUM_ROWS = 8, 6
numbers = st.integers(0, NUM_KEYS - 1)
chains = st.lists(numbers, min_size=1, max_size=4, unique=True)


class Medium:
    """Storage that outlives engines: objects by id, and its current faults."""

    def __init__(self):
        self.objects: dict[bytes, bytes] = {}
        self.is_down = False
        self.is_responding = threading.Event()
        self.is_responding.set()


class MediumTier(Health):
    """A lower tier that is as healthy as its medium, and reports invalid objects as real tiers do."""

    num_outages = 0
    is_open = False

    def __init__(self, medium):
        super().__init__()
        self.medium = medium
        self.health = self

    def _enter(self):
        assert self.medium.is_responding.wait(TIMEOUT)
        if self.medium.is_down:
            raise TierUnavailableError("down")

    def find_each(self, ids):
        self._enter()
        return [object_id in self.medium.objects for object_id in ids]

    def load(self, object_id, into, length):
        self._enter()
        payload = self.medium.objects.get(object_id)
        if payload is None or len(payload) != length:
            into[:3] = b"???"
            return None
        into[:] = payload
        return Loaded(length, b"")

    def store(self, object_id, payload):
        self._enter()
        self.medium.objects.setdefault(bytes(object_id), bytes(payload))
        return True

    def touch(self, keys, num_columns):
        self._enter()
        return set()

    def close(self):
        pass


class Engines(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.medium = Medium()
        self.contexts = {}
        self.num_updates = 0
        self.opened = mock.patch.object(TierSettings, "open", side_effect=lambda _: MediumTier(self.medium))
        self.opened.start()
        self.world = self.make_world()

    def make_world(self):
        world = OffloadingWorld(NUM_ROWS, disk_path="unused", weights_fingerprint="w", **PATIENT)
        assert not world.tier._is_off
        return world

    @rule(chain=chains)
    def store(self, chain):
        self.world.store(*map(self.key, chain))

    @rule(chain=chains)
    def load(self, chain):
        self.medium.is_responding.set()
        self.world.load(*map(self.key, chain))

    @rule(name=st.integers(0, 2), chain=chains)
    def look(self, name, chain):
        """Look chunks up repeatedly in one request, which may end in between."""
        if name not in self.contexts:
            self.contexts[name] = self.world.request()
        keys = list(map(self.key, chain))
        results = self.world.look(self.contexts[name], keys)
        assert set(results) <= set(LookupResult)

    @rule(name=st.integers(0, 2))
    def finish(self, name):
        if name in self.contexts:
            self.world.finish(self.contexts.pop(name))

    @rule()
    def step(self):
        self.world.step()

    @rule()
    def fill(self):
        """Use all rows: only jobs and loads hold rows, and all have ended."""
        self.medium.is_responding.set()
        self.world.forget_primary()

    @rule(is_down=st.booleans())
    def set_outage(self, is_down):
        self.medium.is_down = is_down

    @precondition(lambda self: self.medium.is_responding.is_set())
    @rule()
    def hang(self):
        self.medium.is_responding.clear()

    @rule()
    def respond(self):
        self.medium.is_responding.set()

    @rule(number=numbers, payload=st.sampled_from([None, b"short"]))
    def damage(self, number, payload):
        objects = self.medium.objects
        for object_id in list(objects)[number : number + 2]:
            del objects[object_id]
            if payload is not None:
                objects[object_id] = payload

    @rule()
    def update_weights(self):
        self.medium.is_responding.set()
        self.num_updates += 1
        self.world.reset(self.num_updates)

    @rule()
    def restart(self):
        """Restart the engine. The next engine has the weights of the latest reset."""
        self.medium.is_responding.set()
        self.world.close()
        self.contexts.clear()
        self.world = self.make_world()

    def key(self, number):
        return key_of(number, number % 2)

    def teardown(self):
        self.medium.is_responding.set()
        self.medium.is_down = False
        try:
            self.world.settle()
            self.world.load(self.key(0))
            for _ in range(2):  # fails if any row is still held
                self.world.forget_primary()
        finally:
            self.world.close()
            self.opened.stop()


Engines.TestCase.settings = settings(
    max_examples=examples(25), stateful_step_count=30, suppress_health_check=list(HealthCheck)
)
test_tier_is_right_for_any_order_of_events = Engines.TestCase
