"""Random sequences of valid and invalid shard lists and of lost shards: the tier finds exactly the rows that
the shards in question hold.
"""

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import hypothesis.strategies as st
import pytest
import xxhash
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmcache_sidecar.files.shards import ShardsFile
from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.circuit import Circuit
from lmcache_store.tiers.errors import TierUnavailableError
from lmcache_store.tiers.probing import num_leading
from lmcache_store.tiers.remote.address import Address
from lmcache_store.tiers.remote.tier import RemoteTier
from lmcache_store.tiers.remote.topology import ShardsTopology
from testing.processes import RedisProcess
from tests.harness.scope import examples

pytestmark = pytest.mark.redis

KEYS = [number.to_bytes(64, "big") for number in range(24)]
SERVERS = range(4)
SOME_KEYS = st.integers(1, 2 ** len(KEYS) - 1).map(
    lambda bits: [key for number, key in enumerate(KEYS) if bits >> number & 1]
)
LISTS = st.lists(st.sampled_from(SERVERS), min_size=1, unique=True)
BAD_TEXTS = ["", "current: []", "current: [a b]", "current: [a, a]", "current: [", "- a", "current: a:1"]


def payload_of(key: bytes) -> bytes:
    return key * 3


class ShardsMachine(RuleBasedStateMachine):
    """``contents``: the rows of each server. ``down``: the servers that do not answer."""

    servers: list[RedisProcess]

    def __init__(self) -> None:
        super().__init__()
        self.folder = contextlib.ExitStack()
        self.path = Path(self.folder.enter_context(tempfile.TemporaryDirectory())) / "shards.yaml"
        self.contents: dict[int, set[bytes]] = {number: set() for number in SERVERS}
        self.down: set[int] = set()
        self.current, self.previous, self.is_over = [0], [], True
        for server in self.servers:
            server.client.flushall()

    @initialize()
    def begin(self) -> None:
        self.remote = RemoteTier(Address.parse(f"redis://{self.name(0)}"), timeout_seconds=60)
        self.file = ShardsFile(str(self.path), self.remote)

    def teardown(self) -> None:
        for number in self.down:
            self.servers[number].start()
        self.remote.close()
        self.folder.close()

    # ---- expected state ----

    def name(self, number: int) -> str:
        return f"127.0.0.1:{self.servers[number].port}"

    def owner(self, shards: list[int], key: bytes) -> int:
        def weight(number: int) -> int:
            return xxhash.xxh3_64_intdigest(key, xxhash.xxh3_64_intdigest(self.name(number).encode()))

        return max(shards, key=weight)

    def servers_of(self, key: bytes) -> list[int]:
        former = [] if self.is_over or not self.previous else [self.owner(self.previous, key)]
        return [self.owner(self.current, key), *former]

    def holder(self, key: bytes) -> int | None:
        holders = [n for n in self.servers_of(key) if n not in self.down and key in self.contents[n]]
        return holders[0] if holders else None

    @property
    def is_unavailable(self) -> bool:
        return self.down >= set(self.current)

    # ---- rules ----

    def change(self, text: str) -> None:
        self.path.write_text(text)
        self.file.follow()

    @rule(shards=LISTS, is_planned=st.sampled_from([True, True, False]))
    def change_shards(self, shards: list[int], is_planned: bool) -> None:
        """Change the list like the operator, with the previous shards, or by hand, without them."""
        settled = {key for key in KEYS if self.holder(key) == self.owner(self.current, key)}
        moving = {key for key in KEYS if self.owner(shards, key) != self.owner(self.current, key)}
        self.previous, self.current, self.is_over = self.current if is_planned else [], shards, False
        until = datetime.fromtimestamp(time.time() + 9000, UTC).isoformat()
        current, previous = ([self.name(n) for n in list_] for list_ in (self.current, self.previous))
        self.change(json.dumps({"current": current, "previous": previous, "until": until}))
        assert self.file.problem == ""
        lost = {key for key in settled if self.holder(key) is None}
        assert lost <= (set() if is_planned else moving)
        self.update_circuits()

    @rule()
    def end_window(self) -> None:
        self.is_over = True
        current, previous = ([self.name(n) for n in list_] for list_ in (self.current, self.previous))
        until = "2001-01-01T00:00:00Z"
        self.change(json.dumps({"current": current, "previous": previous, "until": until}))

    @rule(text=st.sampled_from(BAD_TEXTS))
    def edit_by_mistake(self, text: str) -> None:
        self.change(text)
        assert self.file.problem

    @rule(keys=SOME_KEYS)
    def store(self, keys: list[bytes]) -> None:
        for key in keys:
            self.store_one(key)

    def store_one(self, key: bytes) -> None:
        owner, payload = self.owner(self.current, key), memoryview(payload_of(key))
        if self.is_unavailable:
            with pytest.raises(TierUnavailableError):
                self.remote.store(ObjectId(key, 0), payload)
        else:
            assert self.remote.store(ObjectId(key, 0), payload) == (owner not in self.down)
            if owner not in self.down:
                self.contents[owner].add(key)

    @rule(keys=SOME_KEYS)
    def load(self, keys: list[bytes]) -> None:
        for key in keys:
            into = memoryview(bytearray(1000))
            if self.is_unavailable:
                with pytest.raises(TierUnavailableError):
                    self.remote.load(ObjectId(key, 0), into)
                continue
            loaded, holder = self.remote.load(ObjectId(key, 0), into), self.holder(key)
            assert (loaded is None) == (holder is None)
            if loaded is not None:
                assert into[: loaded.length] == payload_of(key)
                assert loaded.is_misplaced == (holder != self.owner(self.current, key))
                if loaded.is_misplaced:  # the tiered store moves the row to its current owner
                    self.store_one(key)

    @rule()
    def touch(self) -> None:
        if self.is_unavailable:
            with pytest.raises(TierUnavailableError):
                self.remote.touch(KEYS, 1)
            return
        owners = {key: self.owner(self.current, key) for key in KEYS}
        absent = {key for key, n in owners.items() if n not in self.down and key not in self.contents[n]}
        assert self.remote.touch(KEYS, 1) == absent

    @precondition(lambda self: len(self.down) < 2)
    @rule(number=st.sampled_from(SERVERS))
    def lose_a_shard(self, number: int) -> None:
        if number not in self.down:
            self.servers[number].kill()
            self.down.add(number)
            self.contents[number].clear()
            self.update_circuits()

    @precondition(lambda self: self.down)
    @rule()
    def restart_a_shard(self) -> None:
        self.servers[self.down.pop()].start()
        self.update_circuits()

    def update_circuits(self) -> None:
        """Probe all servers now. When a circuit would notice by itself is not tested here."""
        assert isinstance(self.remote._topology, ShardsTopology)
        for server in self.remote._topology._pools.values():
            server.circuit.probe()

    @invariant()
    def find(self) -> None:
        if not hasattr(self, "remote"):
            return
        is_held = [self.holder(key) is not None for key in KEYS]
        if self.is_unavailable:
            assert self.remote.health.is_open
            with pytest.raises(TierUnavailableError):
                num_leading(self.remote, KEYS, 1)
        else:
            assert self.remote.find_each([ObjectId(key, 0) for key in KEYS]) == is_held
            assert num_leading(self.remote, KEYS, 1) == [*is_held, False].index(False)


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[None]:
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Circuit, "_keep_probing", lambda _: None)  # `update_circuits` probes instead
        ShardsMachine.servers = [stack.enter_context(RedisProcess()) for _ in SERVERS]
        yield


class TestShards(ShardsMachine.TestCase):  # type: ignore[valid-type]  # Hypothesis makes the class
    # No shrinking: each example keeps real servers busy for a second.
    settings = settings(
        max_examples=examples(30), stateful_step_count=30, phases=[Phase.reuse, Phase.generate]
    )
