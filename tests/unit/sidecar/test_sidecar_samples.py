"""What a sidecar says of the requests that were looked up."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_sidecar.clients.registry import Clients
from lmcache_sidecar.clients.validation import Peer, parse_hello
from lmcache_sidecar.samples import Samples

from lmcache.curves import HASHES
from lmcache.rpc import kvcache_pb2 as pb
from lmcache.rpc.attachment import hello_message
from lmcache.rpc.client import KVGroup, Role
from lmcache.tiers.memory.contracts import Chains
from tests.harness.wire import NAMESPACE, make_hello
from tests.harness.world import FakeLock, new_uuid, world

__all__ = ["world"]

CHUNK_BYTES = 100_000


def answer(samples: Samples, query: str = "") -> dict:
    return json.loads(asyncio.run(samples.answer(query)))


def keys(told: dict) -> list[list[int]]:
    """By request."""
    found = [int(told["key"][at : at + 16], 16) for at in range(0, len(told["key"]), 16)]
    assert len(found) == len(told["tier"]) == sum(told["num"])
    return [[found.pop(0) for _ in range(num)] for num in told["num"]]


class Ring:
    """Samples of one engine, told without a sidecar."""

    def __init__(self, tmp_path, **fields) -> None:
        self.now = 1000.0
        self.origins: dict[bytes, str] = {}
        self.samples = Samples(Clients(tmp_path, FakeLock, self.clock), self.clock)
        self.peer = self.make_peer(**fields)

    def clock(self) -> float:
        return self.now

    @staticmethod
    def make_peer(**fields) -> Peer:
        return parse_hello(hello_message(make_hello(Role.SCHEDULER, **fields), new_uuid()))

    def note(self, tails: list[int], held: int = 0, hit: int = 0, loaded: int = 0, **fields) -> None:
        peer, usable = fields.get("peer", self.peer), fields.get("usable", 100)
        namespace = fields.get("namespace", peer.hello.namespace)
        groups = range(len(peer.storing))
        rows = tuple([row_key(tail, group, namespace) for tail in tails] for group in groups)
        chains = Chains(256, tuple(peer.groups.values()), rows)
        scheduled = pb.Scheduled(num_engine_chunks=held, num_hit_chunks=hit, num_loaded_tokens=loaded)
        self.samples.note(peer, chains, scheduled, usable, self.origins)


@pytest.fixture
def ring(tmp_path):
    return Ring(tmp_path)


def row_key(tail: int, group: int = 0, namespace: bytes = NAMESPACE) -> bytes:
    return namespace + group.to_bytes(24, "big") + tail.to_bytes(8, "big")


def test_before_the_first_request_there_is_nothing(ring):
    told = answer(ring.samples)
    assert told == {
        "version": 1, "now": 1000.0, "started": 1000.0, "namespace": "", "chunk_tokens": 0, "row_bytes": 0,
        "below": HASHES, "since": 0, "next": 0, "dropped": 0, "t0": 0.0,
        "ms": [], "num": [], "key": "", "tier": "",
    }  # fmt: skip


def test_a_request_is_told_tail_first_with_where_each_chunk_was_found(ring):
    ring.origins = {row_key(3): "disk", row_key(4): "remote", row_key(9): "disk"}
    ring.note([1, 2, 3, 4, 5], held=1, hit=4, loaded=700)
    ring.now += 1.5
    ring.note([1, 2, 3, 4, 5], hit=5)
    told = answer(ring.samples)
    assert keys(told) == [[5, 4, 3, 2, 1]] * 2
    assert told["tier"] == "-rdme" + "mmmmm"
    assert (told["t0"], told["ms"], told["now"]) == (1000.0, [0, 1500], 1001.5)
    assert told["namespace"] == NAMESPACE.hex()
    assert (told["chunk_tokens"], told["row_bytes"]) == (256, ring.peer.geometry.slot_bytes)
    stats = ring.samples.stats
    assert (stats.num_lookups, stats.lookup_tokens) == (2, 2560)
    assert stats.hit_tokens == {"engine": 256, "memory": 6 * 256, "disk": 256, "remote": 256}
    assert stats.loaded_tokens == {"remote": 256, "disk": 256, "memory": 188}
    assert stats.miss_bytes == ring.samples.row_bytes
    assert ring.origins == {row_key(9): "disk"}


def test_a_chunk_counts_once_whichever_of_its_rows_were_brought(tmp_path):
    ring = Ring(tmp_path, groups=(KVGroup(0, 16, 100_000), KVGroup(1, 16, 50_000)))
    ring.origins = {row_key(1): "disk", row_key(1, group=1): "remote", row_key(2, group=1): "remote"}
    ring.note([1, 2, 3], hit=3)
    assert answer(ring.samples)["tier"] == "mrd"
    assert ring.samples.stats.hit_tokens == {"disk": 256, "remote": 256, "memory": 256}
    assert not ring.origins


def test_a_client_can_claim_no_more_than_it_asked_for(ring):
    ring.note([1, 2], held=9, hit=7, loaded=2**64 - 1)
    ring.note([1], held=0, hit=1, loaded=2**64 - 1)
    ring.note([])
    assert answer(ring.samples)["tier"] == "eem"
    assert ring.samples.stats.loaded_tokens == {"memory": 256}


def test_a_chunk_of_several_groups_is_one_key_with_the_bytes_of_all(tmp_path):
    groups = (KVGroup(0, 16, 100_000), KVGroup(1, 16, 50_000))
    ring = Ring(tmp_path, groups=groups, num_columns=2)
    ring.note([1, 2, 3])
    geometry = ring.peer.geometry
    slots = -(-100_000 // geometry.slot_bytes) + -(-50_000 // geometry.slot_bytes)
    assert ring.samples.row_bytes == slots * geometry.slot_bytes * 2
    assert ring.samples.kv_bytes_per_token == 300_000 / 256
    assert keys(answer(ring.samples)) == [[3, 2, 1]]


@pytest.mark.parametrize(("rows", "share"), [(1600, 1.0), (3200, 0.5), (160_000, 0.01)])
def test_a_full_memory_holds_sixteen_hundred_sampled_keys(ring, rows, share):
    ring.note([1], usable=rows)
    assert answer(ring.samples)["below"] == pytest.approx(share * HASHES)


def test_when_memory_shrinks_older_requests_keep_the_answer_at_their_rate(ring):
    high = HASHES * 3 // 4
    ring.note([1, high], usable=3200)  # half of the keys
    ring.note([1, high], usable=1600)
    told = answer(ring.samples)
    assert told["below"] == HASHES // 2
    assert keys(told) == [[1], [1]]
    told = answer(ring.samples, f"since={told['since'] + 1}")
    assert (told["below"], keys(told)) == (HASHES, [[high, 1]])


def test_fewer_keys_are_told_on_demand_and_heads_always(ring):
    ring.note([HASHES - 1, 5, HASHES - 2, 7], hit=2)
    told = answer(ring.samples, "below=6")
    assert (told["below"], keys(told), told["tier"]) == (6, [[5, HASHES - 1]], "mm")


def test_an_answer_goes_on_where_the_last_one_ended_and_says_what_is_lost(ring):
    for number in range(3):
        ring.note([number, number + 100])
    assert keys(answer(ring.samples, "since=4")) == [[102, 2]]
    last = answer(ring.samples, "since=6")
    assert (last["since"], last["next"], last["num"]) == (6, 6, [])
    ring.note(list(range(65_535)))
    told = answer(ring.samples, "since=4")
    assert (told["since"], told["next"], told["dropped"], told["num"]) == (6, 65_541, 2, [65_535])
    assert ring.samples.num_dropped == 6


def test_others_have_their_turns_while_a_full_ring_is_told(ring):
    for number in range(1 << 16):
        ring.note([number])

    async def turns() -> int:
        told, number = asyncio.create_task(ring.samples.answer("")), 0
        while not told.done():
            number += 1
            await asyncio.sleep(0)
        assert len(json.loads(await told)["num"]) == 1 << 16
        return number

    assert asyncio.run(turns()) > 2 * (1 << 16) // 256


def test_a_full_ring_is_told_in_two_mebibytes(ring):
    for first in range(0, 1 << 16, 16):
        ring.now += 0.013
        ring.note([HASHES - 1 - at for at in range(first, first + 16)])
    text = asyncio.run(ring.samples.answer(""))
    assert len(text) <= 18 * (1 << 16)
    assert json.loads(text)["dropped"] == 0


@pytest.mark.parametrize(
    "query",
    ["since=-1", "since=", "below=0", "below=18446744073709551617", "since=1e3", "since=1_0", "x=1",
     "since=" + "9" * 5000, "below=%00", "since=١"],
)  # fmt: skip
def test_a_bad_question_is_refused_with_a_sentence(ring, query):
    ring.note([1])
    with pytest.raises(ValueError, match=r"since|below"):
        asyncio.run(ring.samples.answer(query))


def test_keys_of_after_a_reset_are_others(ring):
    ring.note([1, 2])
    ring.note([1, 2], namespace=b"r" * 32)
    ring.note([1, 2], namespace=b"r" * 32)
    first, second, third = keys(answer(ring.samples))
    assert second == third
    assert not set(first) & set(second)


def test_one_namespace_is_followed_until_its_engines_are_gone(world):
    samples, told = world.sessions.samples, pb.Scheduled()
    first = world.attach(new_uuid(), kv_bytes=1000)
    other = world.attach(new_uuid(), namespace=b"o" * 32, engine_uuid=b"f" * 16)
    twin = world.attach(new_uuid(), engine_uuid=b"g" * 16, kv_bytes=500)
    world.lookup(first, "r", 1, 2, scheduled=told)
    world.lookup(other, "r", 3, scheduled=told)
    world.lookup(twin, "r", 4, scheduled=told)
    assert list(map(len, keys(answer(samples)))) == [2, 1]
    assert samples.stats.num_lookups == 2
    assert {client.peer.uuid for client in samples.followed()} == {first.peer.uuid, twin.peer.uuid}
    started = answer(samples)["started"]
    for client in (first, twin):
        world.sessions.clients.detach(client)
    world.lookup(other, "r", 5, scheduled=told)
    later = answer(samples)
    assert (later["namespace"], later["num"], later["next"]) == ("6f" * 32, [1], 1)
    assert later["started"] > started


def test_asking_is_no_access(world):
    client = world.attach(new_uuid())
    for _ in range(3):
        world.lookup(client, "r", 1, 2)
    assert world.sessions.samples.stats.num_lookups == 0
    world.lookup(client, "r", 1, 2, scheduled=pb.Scheduled())
    assert world.sessions.samples.stats.num_lookups == 1


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, HASHES - 1), max_size=5), st.floats(-5, 5)), max_size=30),
    st.data(),
)
def test_polls_together_tell_what_one_would(tmp_path_factory, requests, data):
    ring, polled, since = Ring(tmp_path_factory.getbasetemp()), [], 0
    for tails, seconds in requests:
        ring.now += seconds
        ring.note(tails)
        if data.draw(st.booleans()):
            told = answer(ring.samples, f"since={since}")
            polled += zip(keys(told), (told["t0"] + ms / 1000 for ms in told["ms"]), strict=True)
            since = told["next"]
    told = answer(ring.samples, f"since={since}")
    polled += zip(keys(told), (told["t0"] + ms / 1000 for ms in told["ms"]), strict=True)
    whole = answer(ring.samples)
    assert [one for one, _ in polled] == keys(whole) == [tails[::-1] for tails, _ in requests if tails]
    times = [whole["t0"] + ms / 1000 for ms in whole["ms"]]
    assert [time for _, time in polled] == pytest.approx(times, abs=0.0011)


def test_what_comes_while_a_ring_is_told_is_in_the_next_answer(ring):
    for number in range(2000):
        ring.note([number])

    async def serve(telling: asyncio.Task) -> None:
        number = 2000
        while not telling.done():
            number += 1
            ring.note([number])
            await asyncio.sleep(0)

    async def tell() -> dict:
        telling = asyncio.create_task(ring.samples.answer(""))
        await serve(telling)
        return json.loads(telling.result())

    first = asyncio.run(tell())
    later = answer(ring.samples, f"since={first['next']}")
    assert sum(later["num"]), "nothing came meanwhile"
    assert (first["dropped"], later["dropped"]) == (0, 0)
    assert sum(first["num"]) + sum(later["num"]) == later["next"]
