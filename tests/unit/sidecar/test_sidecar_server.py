"""The gRPC server and its statistics: a bug in a handler, the JSON document, and the metrics."""

import asyncio
import errno
import json
from collections import Counter
from dataclasses import dataclass, fields

import grpc
import grpc.aio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_client.rpc.service import LOOKUP, RELEASE
from lmcache_sidecar.calls import CallStats
from lmcache_sidecar.lower_tiers import TierHandle
from lmcache_sidecar.pages.metrics import render
from lmcache_sidecar.pages.stats import Figure, StatsPart, declared, document, read, tier_part
from lmcache_sidecar.server import Server
from lmcache_store.tiers.disk.tier import DiskTier
from lmcache_store.tiers.stats import MemoryStats, ObjectStats, Removal, TieredStats, counter, counters
from tests.harness.loops import in_a_loop


class BrokenSessions:
    """Sessions in which each call except release has a bug."""

    def check_arena(self) -> None:
        """The arena is whole."""

    def lookup(self, request: pb.LookupRequest) -> pb.LookupReply:
        raise RuntimeError("boom")

    reserve = copy_blocks = commit = abort = share_marks = apply_hints = read_hints = lookup

    def release(self, request: pb.ReleaseRequest) -> pb.ReleaseReply:
        return pb.ReleaseReply()


@in_a_loop
async def test_bug_in_a_handler_returns_internal_error_and_the_server_continues(tmp_path, caplog):
    metrics = CallStats()
    server = Server(BrokenSessions(), str(tmp_path / "s.sock"), metrics)
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s.sock") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(LOOKUP.path, None, None)(b"", timeout=60)
        assert await channel.unary_unary(RELEASE.path, None, None)(b"", timeout=60) == b""
    await server.stop()
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details().endswith("failed: this is a bug, see the sidecar's log")
    assert "boom" in caplog.text
    text = (await render(metrics, [])).decode()
    assert 'lmcache_rpcs_total{code="INTERNAL",method="Lookup"} 1.0' in text
    assert 'lmcache_rpcs_total{code="OK",method="Release"} 1.0' in text
    assert 'lmcache_rpc_seconds_count{method="Release"} 1.0' in text
    assert 'lmcache_rpc_seconds_count{method="Lookup"}' not in text  # failed calls are not timed


@dataclass
class Counts:
    """Counters of a part."""

    hits: int = counter("Rows that were found")
    removed: Counter[Removal] = counters("reason", "Rows that left")
    internal: int = 0  # for the part's own use


COUNTS = Counts(hits=7, removed=Counter({Removal.EVICTED: 3}))
PARTS = [
    StatsPart(
        "",
        {"version": "1.2"},
        read([Figure("num_clients", "Clients", lambda _: {"attached": 2, "quarantined": 1}, "state")], COUNTS)
        | read([Figure("is_ready", "1 if ready", lambda _: False)], COUNTS)
        | read([Figure("absent", "Of a part that is not there", lambda _: 1)], None),
    ),
    *(
        StatsPart(name, {"address": name}, read(declared(Counts), COUNTS), "lmcache_tier", {"tier": name})
        for name in ("disk", "remote")
    ),
]


def test_document_contains_all_parts():
    tier = {"hits": 7, "removed": {"evicted": 3}}
    assert json.loads(json.dumps(document(PARTS))) == {
        "version": "1.2",
        "num_clients": {"attached": 2, "quarantined": 1},
        "is_ready": False,
        "disk": {"address": "disk"} | tier,
        "remote": {"address": "remote"} | tier,
    }


def test_render_writes_prometheus_text():
    lines = asyncio.run(render(CallStats(), PARTS)).decode().splitlines()
    text = [line for line in lines if "process_" not in line and "lmcache_rpc" not in line]
    assert text == [
        "# HELP lmcache_clients Clients",
        "# TYPE lmcache_clients gauge",
        'lmcache_clients{state="attached"} 2.0',
        'lmcache_clients{state="quarantined"} 1.0',
        "# HELP lmcache_ready 1 if ready",
        "# TYPE lmcache_ready gauge",
        "lmcache_ready 0.0",
        "# HELP lmcache_tier_hits_total Rows that were found",
        "# TYPE lmcache_tier_hits_total counter",
        'lmcache_tier_hits_total{tier="disk"} 7.0',
        'lmcache_tier_hits_total{tier="remote"} 7.0',
        "# HELP lmcache_tier_removed_total Rows that left",
        "# TYPE lmcache_tier_removed_total counter",
        'lmcache_tier_removed_total{reason="evicted",tier="disk"} 3.0',
        'lmcache_tier_removed_total{reason="evicted",tier="remote"} 3.0',
    ]


def test_prometheus_parser_reads_the_rendered_text():
    calls = CallStats()
    for seconds in (0.0, 5e-5, 6e-5, 0.3, 7.0):
        calls.observe("Lookup", seconds)
    calls.count("Lookup", grpc.StatusCode.OK)
    writes = Figure("writes", "Rows", lambda counts: counts, "result", is_counter=True)
    part = StatsPart("remote", {}, {writes: {'a "quoted" \\ label\n': 1}}, "lmcache_tier", {"tier": "remote"})
    text = asyncio.run(render(calls, [part])).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for family in families.values():
        assert family.documentation
        assert family.type in ("counter", "gauge", "histogram")
    (written,) = families["lmcache_tier_writes"].samples
    assert written.labels == {"tier": "remote", "result": 'a "quoted" \\ label\n'}
    durations = families["lmcache_rpc_seconds"].samples
    buckets = {sample.labels["le"]: sample.value for sample in durations if sample.name.endswith("_bucket")}
    assert (buckets["5e-05"], buckets["0.0001"], buckets["1.0"], buckets["+Inf"]) == (2, 3, 4, 5)
    assert {s.name[len("lmcache_rpc_seconds") :]: s.value for s in durations[-2:]} == {
        "_count": 5,
        "_sum": 7.30011,
    }
    assert families["process_resident_memory_bytes"].samples[0].value > 1 << 20


@in_a_loop
async def test_other_tasks_run_during_rendering():
    rendering, turns = asyncio.create_task(render(CallStats(), PARTS)), 0
    while not rendering.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 2 + 4  # families of calls and of PARTS


def test_reason_why_a_tier_is_off_is_shown(tmp_path):
    disk = DiskTier(tmp_path, 1 << 20)

    def fail() -> None:  # also for the thread that probes the tier
        raise OSError(errno.EROFS, "Read-only file system")

    try:
        disk._directory.check = fail
        assert not disk.health.probe()
        part = tier_part("disk", TierHandle("/disk", disk), None)
    finally:
        disk.close()
    tier_stats = document([part])["disk"]
    assert (tier_stats["is_reachable"], tier_stats["off_reason"]) == (0, "[Errno 30] Read-only file system")


def test_reasons_added_by_threads_do_not_break_reading():
    """A tier's threads add reasons while the loop reads them."""

    class Reason(str):
        @property
        def value(self) -> str:
            stats.refused[f"{self} again"] += 1
            return str(self)

    stats = ObjectStats()
    stats.refused[Reason("OOM")] += 1
    (refused,) = (figure for figure in declared(ObjectStats) if figure.name == "refused")
    assert read([refused], stats) == {refused: {"OOM": 1}}


def test_all_counters_of_tiers_are_shown():
    """A field without ``counter`` would not be shown."""
    for kind in (MemoryStats, TieredStats, ObjectStats):
        assert {figure.name for figure in declared(kind)} == {
            field.name
            for field in fields(kind)
            if field.name[0] != "_" and field.type not in ("TenantUses", "TenantCounts")
        }
