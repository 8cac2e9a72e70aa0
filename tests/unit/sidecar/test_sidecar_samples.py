"""Samples of lookups that a sidecar returns at ``/samples``."""

import asyncio
import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_client.rpc.attachment import hello_message
from lmcache_client.rpc.hello import Role
from lmcache_sidecar.clients.registry import Clients
from lmcache_sidecar.clients.validation import parse_hello
from lmcache_sidecar.explain.sources import find_sources
from lmcache_sidecar.pages.stats import LOOKUPS, read
from lmcache_sidecar.samples import LookupSampler
from lmcache_store.curves import HASHES, Lookup, MissRatioCurve
from lmcache_store.kv_groups import KVGroup
from lmcache_store.tiers.memory.contracts import Chains
from tests.harness.scope import examples
from tests.harness.sidecar.wire import NAMESPACE, make_hello
from tests.harness.sidecar.world import FakeLock, new_uuid, world

__all__ = ["world"]

CHUNK_BYTES = 100_000


def answer(samples: LookupSampler, query: str = "") -> dict:
    return json.loads(asyncio.run(samples.answer(query)))


def keys(parsed: dict) -> list[list[int]]:
    """Key hashes of each request in an answer."""
    hashes = [int(parsed["key"][offset : offset + 16], 16) for offset in range(0, len(parsed["key"]), 16)]
    assert len(hashes) == len(parsed["tier"]) == sum(parsed["num"])
    return [[hashes.pop(0) for _ in range(num)] for num in parsed["num"]]


class Ring:
    """The sample ring of an engine, without a sidecar."""

    def __init__(self, tmp_path, **fields) -> None:
        self.now = 1000.0
        self.origins: dict[bytes, str] = {}
        self.samples = LookupSampler(Clients(tmp_path, FakeLock, self.clock), self.clock)
        self.peer = parse_hello(hello_message(make_hello(Role.SCHEDULER, **fields), new_uuid()))

    def clock(self) -> float:
        return self.now

    def note(self, tails: list[int], held: int = 0, hit: int = 0, loaded: int = 0, **fields) -> None:
        namespace = fields.get("namespace", self.peer.hello.namespace)
        groups = range(len(self.peer.storing))
        rows = tuple([row_key(tail, group, namespace) for tail in tails] for group in groups)
        chains = Chains(256, tuple(self.peer.groups.values()), rows)
        scheduled = pb.Scheduled(num_engine_chunks=held, num_hit_chunks=hit, num_loaded_tokens=loaded)
        sources = find_sources(chains, scheduled, self.origins)
        tokens = loaded, fields.get("blended", 0)
        self.samples.note(self.peer, chains, sources, *tokens, fields.get("usable", 100))

    def note_document(self, tails: list[int]) -> None:
        chains = Chains(256, tuple(self.peer.groups.values()), ([row_key(tail) for tail in tails],))
        sources = find_sources(chains, pb.Scheduled(num_hit_chunks=len(tails)), self.origins)
        self.samples.note_document(self.peer, chains, sources, 100)


@pytest.fixture
def ring(tmp_path):
    return Ring(tmp_path)


def row_key(tail: int, group: int = 0, namespace: bytes = NAMESPACE) -> bytes:
    return namespace + group.to_bytes(24, "big") + tail.to_bytes(8, "big")


def test_answer_is_empty_before_the_first_request(ring):
    parsed = answer(ring.samples)
    assert parsed == {
        "version": 1, "now": 1000.0, "started": 1000.0, "namespace": "", "chunk_tokens": 0, "row_bytes": 0,
        "below": HASHES, "since": 0, "next": 0, "dropped": 0, "t0": 0.0,
        "ms": [], "num": [], "key": "", "tier": "",
    }  # fmt: skip


def test_answer_lists_chunks_tail_first_with_their_tiers(ring):
    ring.origins = {row_key(3): "disk", row_key(4): "remote", row_key(9): "disk"}
    ring.note([1, 2, 3, 4, 5], held=1, hit=4, loaded=700)
    ring.now += 1.5
    ring.note([1, 2, 3, 4, 5], hit=5)
    parsed = answer(ring.samples)
    assert keys(parsed) == [[5, 4, 3, 2, 1]] * 2
    assert parsed["tier"] == "-rdme" + "mmmmm"
    assert (parsed["t0"], parsed["ms"], parsed["now"]) == (1000.0, [0, 1500], 1001.5)
    assert parsed["namespace"] == NAMESPACE.hex()
    assert (parsed["chunk_tokens"], parsed["row_bytes"]) == (256, ring.peer.geometry.slot_bytes)
    stats = ring.samples.stats
    assert (stats.num_lookups, stats.lookup_tokens) == (2, 2560)
    assert stats.hit_tokens == {"engine": 256, "memory": 6 * 256, "disk": 256, "remote": 256}
    assert stats.loaded_tokens == {"remote": 256, "disk": 256, "memory": 188}
    assert ring.origins == {row_key(9): "disk"}


def test_chunk_counts_once_whichever_of_its_rows_were_promoted(tmp_path):
    ring = Ring(tmp_path, groups=(KVGroup(0, 16, 100_000), KVGroup(1, 16, 50_000)))
    ring.origins = {row_key(1): "disk", row_key(1, group=1): "remote", row_key(2, group=1): "remote"}
    ring.note([1, 2, 3], hit=3)
    assert answer(ring.samples)["tier"] == "mrd"
    assert ring.samples.stats.hit_tokens == {"disk": 256, "remote": 256, "memory": 256}
    assert not ring.origins


def test_reported_hits_are_limited_to_the_lookup(ring):
    ring.note([1, 2], held=9, hit=7, loaded=2**64 - 1)
    ring.note([1], held=0, hit=1, loaded=2**64 - 1)
    ring.note([])
    assert answer(ring.samples)["tier"] == "eem"
    assert ring.samples.stats.loaded_tokens == {"memory": 256}


def test_chunk_of_several_groups_is_a_single_key_with_all_bytes(tmp_path):
    groups = (KVGroup(0, 16, 100_000), KVGroup(1, 16, 50_000))
    ring = Ring(tmp_path, groups=groups, num_columns=2)
    ring.note([1, 2, 3])
    geometry = ring.peer.geometry
    slots = -(-100_000 // geometry.slot_bytes) + -(-50_000 // geometry.slot_bytes)
    assert ring.samples.row_bytes == slots * geometry.slot_bytes * 2
    assert ring.samples.kv_bytes_per_token == 300_000 / 256
    assert keys(answer(ring.samples)) == [[3, 2, 1]]


def test_rows_of_documents_take_the_place_of_a_prompts_chunks(ring):
    ring.origins = {row_key(22): "remote"}
    ring.note_document([21, 22, 23])
    ring.note([1, 2, 3, 4, 5, 6], hit=1, loaded=256, blended=2 * 256 + 200)
    parsed, stats = answer(ring.samples), ring.samples.stats
    assert keys(parsed) == [[23, 22, 21], [4, 3, 2, 1]]
    assert parsed["tier"] == "mrm" + "---m"
    assert (stats.num_lookups, stats.lookup_tokens) == (1, 7 * 256)
    assert stats.hit_tokens == {"memory": 3 * 256, "remote": 256}
    assert stats.loaded_tokens == {"memory": 3 * 256, "remote": 256}


def test_blended_prompt_of_any_numbers_has_no_more_hits_than_chunks(ring):
    ring.note([1, 2], hit=2, blended=2**64 - 1)
    ring.note([3, 4], blended=2**64 - 1)
    ring.note_document([])
    parsed, stats = answer(ring.samples), ring.samples.stats
    assert (keys(parsed), parsed["tier"]) == ([[2, 1]], "mm")
    assert (stats.num_lookups, stats.lookup_tokens, stats.hit_tokens) == (2, 512, {"memory": 512})


def test_curve_of_blended_prompts_shows_what_a_smaller_tier_would_lose(ring):
    """Prompts use three of twelve documents of four rows each, in another order each time."""
    order, question = random.Random(7), itertools.count(1000)
    for _ in range(400):
        ring.now += 1.0
        for number in order.sample(range(12), 3):
            ring.note_document(list(range(4 * number, 4 * number + 4)))
        ring.note([next(question) for _ in range(12)], blended=12 * 256)
    parsed, stats = answer(ring.samples), ring.samples.stats
    curve = MissRatioCurve()
    curve.count_accesses(stats.lookup_tokens // 256)
    curve.feed(Lookup(float(time), requested, 1) for time, requested in enumerate(keys(parsed)))
    assert stats.hit_tokens.total() == stats.lookup_tokens
    assert curve.hit_ratio(48).hit_ratio >= 0.95
    assert curve.hit_ratio(12).hit_ratio <= 0.4


@pytest.mark.parametrize(("rows", "share"), [(1600, 1.0), (3200, 0.5), (160_000, 0.01)])
def test_sampling_rate_keeps_1600_keys_in_memory(ring, rows, share):
    ring.note([1], usable=rows)
    assert answer(ring.samples)["below"] == pytest.approx(share * HASHES)


def test_answer_uses_the_lowest_sampling_rate_of_its_requests(ring):
    high = HASHES * 3 // 4
    ring.note([1, high], usable=3200)  # half of the keys
    ring.note([1, high], usable=1600)
    parsed = answer(ring.samples)
    assert (parsed["below"], keys(parsed)) == (HASHES // 2, [[1], [1]])
    parsed = answer(ring.samples, f"since={parsed['since'] + 1}")
    assert (parsed["below"], keys(parsed)) == (HASHES, [[high, 1]])


def test_below_parameter_filters_keys_except_heads(ring):
    ring.note([HASHES - 1, 5, HASHES - 2, 7], hit=2)
    parsed = answer(ring.samples, "below=6")
    assert (parsed["below"], keys(parsed), parsed["tier"]) == (6, [[5, HASHES - 1]], "mm")


def test_since_parameter_continues_and_reports_dropped_samples(ring):
    for number in range(3):
        ring.note([number, number + 100])
    assert keys(answer(ring.samples, "since=4")) == [[102, 2]]
    empty = answer(ring.samples, "since=6")
    assert (empty["since"], empty["next"], empty["num"]) == (6, 6, [])
    ring.note(list(range(65_535)))
    parsed = answer(ring.samples, "since=4")
    assert (parsed["since"], parsed["next"], parsed["dropped"], parsed["num"]) == (6, 65_541, 2, [65_535])
    assert ring.samples.num_dropped == 6


def test_full_answer_stays_below_two_mebibytes(ring):
    for first in range(0, 1 << 16, 16):
        ring.now += 0.013
        ring.note([HASHES - 1 - offset for offset in range(first, first + 16)])
    text = asyncio.run(ring.samples.answer(""))
    assert len(text) <= 18 * (1 << 16)
    assert json.loads(text)["dropped"] == 0


@pytest.mark.parametrize(
    "query",
    ["since=-1", "since=", "below=0", "below=18446744073709551617", "since=1e3", "since=1_0", "x=1",
     "since=" + "9" * 5000, "below=%00", "since=١"],
)  # fmt: skip
def test_invalid_query_is_refused_with_a_reason(ring, query):
    ring.note([1])
    with pytest.raises(ValueError, match=r"since|below"):
        asyncio.run(ring.samples.answer(query))


def test_keys_change_with_the_namespace_after_a_reset(ring):
    ring.note([1, 2])
    ring.note([1, 2], namespace=b"r" * 32)
    ring.note([1, 2], namespace=b"r" * 32)
    first, second, third = keys(answer(ring.samples))
    assert second == third
    assert not set(first) & set(second)


def test_only_an_engine_that_says_so_has_no_gpus(world):
    """Engines of other versions, and SGLang's, name no GPU."""
    engines = {False: b"f" * 16, True: b"g" * 16}
    for is_cpu, engine in engines.items():
        worker = world.attach(new_uuid(), engine_uuid=engine, computes_on_cpu=is_cpu)
        world.attach(new_uuid(), engine_uuid=engine, computes_on_cpu=is_cpu)
        world.lookup(worker, "r", 1, scheduled=pb.Scheduled())
    clients = world.sessions.clients
    assert [clients.num_gpus(engine) for engine in engines.values()] == [2, 0]
    assert clients.num_gpus(b"h" * 16) == 1, "its workers are not attached"
    figures = {figure.name: value for figure, value in read(LOOKUPS, world.sessions.samples).items()}
    assert (figures["gpus"], world.sessions.samples.computes_on_cpu) == (4, False)
    for client in [client for client in clients.by_uuid.values() if client.peer.engine == engines[False]]:
        clients.detach(client)
    assert world.sessions.samples.computes_on_cpu


def test_workers_on_other_nodes_have_gpus(world):
    """The sidecars of these nodes count no requests."""
    worker = world.attach(new_uuid(), engine_uuid=b"f" * 16, num_parts=4)
    world.attach(new_uuid(), engine_uuid=b"f" * 16, num_parts=4)
    world.lookup(worker, "r", 1, scheduled=pb.Scheduled())
    assert world.sessions.clients.num_gpus(b"f" * 16) == 8
    figures = {figure.name: value for figure, value in read(LOOKUPS, world.sessions.samples).items()}
    assert figures["gpus"] == 8


def test_relayed_lookup_shows_sizes_of_the_node_but_no_gpus(world):
    """The first node's sidecar counts the GPUs of all nodes, so a sum over nodes has each of them once."""
    worker = world.attach(new_uuid(), num_parts=2, kv_bytes=1000)
    world.lookup(worker, "r", 1, 2, relayed=True, prefill_tokens_per_second=9000)
    figures = {figure.name: value for figure, value in read(LOOKUPS, world.sessions.samples).items()}
    names = ("chunk_tokens", "row_bytes", "kv_bytes_per_token", "engine_kv_bytes", "gpus")
    assert [figures[name] for name in names] == [16, 4096, 256, 1000, 0]
    assert figures["prefill_tokens_per_second"] == 0
    assert world.sessions.samples.stats.num_lookups == 0


def test_lookups_of_documents_count_once_the_prompt_uses_their_rows(world):
    worker, scheduler = world.attach(new_uuid()), world.attach(new_uuid(), role=Role.SCHEDULER)
    world.commit(worker, world.reserve(worker, 1).slots)
    stats = world.sessions.samples.stats
    world.lookup(scheduler, "r#0", 1, 2, relayed=True, hint=True)
    assert stats.lookup_tokens == 0
    assert world.lookup(scheduler, "r#0", 1, relayed=True).num_leased == 1
    blended = pb.Scheduled(num_prompt_tokens=20, num_blended_tokens=16)
    world.lookup(scheduler, "r", 3, hint=True, scheduled=blended)
    assert (stats.num_lookups, stats.lookup_tokens, stats.hit_tokens) == (1, 16, {"memory": 16})
    assert world.sessions.store.memory.stats.hits == 0, "no request looked up its own rows"


def test_requests_of_a_former_engine_do_not_count_gpus_of_relayed_lookups(world):
    """Without the operator, a sidecar may serve an engine on its node, and later one over several nodes."""
    former = world.attach(new_uuid())
    world.lookup(former, "r", 1, scheduled=pb.Scheduled())
    world.sessions.clients.detach(former)
    worker = world.attach(new_uuid(), namespace=b"o" * 32, engine_uuid=b"f" * 16, num_parts=2)
    world.lookup(worker, "r", 1, relayed=True)
    assert (world.sessions.samples.counted(), world.sessions.samples.stats.num_lookups) == ([], 1)


def test_sampled_namespace_changes_only_when_its_engines_are_detached(world):
    samples, scheduled = world.sessions.samples, pb.Scheduled()
    first = world.attach(new_uuid(), kv_bytes=1000)
    other_engine = world.attach(new_uuid(), namespace=b"o" * 32, engine_uuid=b"f" * 16)
    twin = world.attach(new_uuid(), engine_uuid=b"g" * 16, kv_bytes=500)
    world.lookup(first, "r", 1, 2, scheduled=scheduled)
    world.lookup(other_engine, "r", 3, scheduled=scheduled)
    world.lookup(twin, "r", 4, scheduled=scheduled)
    assert list(map(len, keys(answer(samples)))) == [2, 1]
    assert samples.stats.num_lookups == 2
    assert {client.peer.uuid for client in samples.followed()} == {first.peer.uuid, twin.peer.uuid}
    started = answer(samples)["started"]
    for client in (first, twin):
        world.sessions.clients.detach(client)
    world.lookup(other_engine, "r", 5, scheduled=scheduled)
    later = answer(samples)
    assert (later["namespace"], later["num"], later["next"]) == ("6f" * 32, [1], 1)
    assert later["started"] > started


@settings(max_examples=examples(100))
@given(
    st.lists(st.tuples(st.lists(st.integers(0, HASHES - 1), max_size=5), st.floats(-5, 5)), max_size=30),
    st.data(),
)
def test_incremental_polls_return_the_same_as_a_full_poll(tmp_path_factory, requests, data):
    ring, polled, since = Ring(tmp_path_factory.getbasetemp()), [], 0
    for tails, seconds in requests:
        ring.now += seconds
        ring.note(tails)
        if data.draw(st.booleans()):
            parsed = answer(ring.samples, f"since={since}")
            polled += zip(keys(parsed), (parsed["t0"] + ms / 1000 for ms in parsed["ms"]), strict=True)
            since = parsed["next"]
    parsed = answer(ring.samples, f"since={since}")
    polled += zip(keys(parsed), (parsed["t0"] + ms / 1000 for ms in parsed["ms"]), strict=True)
    full = answer(ring.samples)
    assert (
        [request_keys for request_keys, _ in polled]
        == keys(full)
        == [tails[::-1] for tails, _ in requests if tails]
    )
    times = [full["t0"] + ms / 1000 for ms in full["ms"]]
    assert [time for _, time in polled] == pytest.approx(times, abs=0.0011)


def test_samples_added_during_a_full_answer_are_in_the_next_answer(ring):
    for number in range(1 << 16):
        ring.note([number])

    async def answer_during_writes() -> dict:
        answering = asyncio.create_task(ring.samples.answer(""))
        for number in itertools.count():
            await asyncio.sleep(0)
            if answering.done():
                break
            if number % 256 == 0:
                ring.note([number])
        assert number >= 2 * (1 << 16) // 256, "other tasks must run meanwhile"
        return json.loads(answering.result())

    first = asyncio.run(answer_during_writes())
    later = answer(ring.samples, f"since={first['next']}")
    assert sum(later["num"]), "no sample was added during the answer"
    assert (first["dropped"], later["dropped"]) == (0, 0)
    assert sum(first["num"]) + sum(later["num"]) == later["next"]
