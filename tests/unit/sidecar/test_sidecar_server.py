"""The gRPC face: what a bug in a handler costs, and that no call waits for a scrape of the metrics."""

from __future__ import annotations

import asyncio
import json

import grpc
import grpc.aio
import pytest
from lmcache_sidecar import stats
from lmcache_sidecar.calls import CallCounts
from lmcache_sidecar.metrics import FAMILIES, render
from lmcache_sidecar.server import Server
from lmcache_sidecar.tiers import Configured
from prometheus_client.parser import text_string_to_metric_families

from lmcache.rpc import kvcache_pb2 as pb
from lmcache.rpc.service import LOOKUP, RELEASE
from lmcache.tiers.remote.tier import RemoteTier


class BrokenSessions:
    """Every call but release has a bug."""

    def lookup(self, request: pb.LookupRequest) -> pb.LookupReply:
        raise RuntimeError("boom")

    reserve = commit = abort = lookup

    def release(self, request: pb.ReleaseRequest) -> pb.ReleaseReply:
        return pb.ReleaseReply()


def test_a_bug_is_an_internal_error_and_the_daemon_lives(tmp_path, caplog):
    metrics = CallCounts()

    async def run() -> grpc.aio.AioRpcError:
        server = Server(BrokenSessions(), str(tmp_path / "s.sock"), metrics)
        await server.start()
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s.sock") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(LOOKUP.path)(b"", timeout=5)
            assert await channel.unary_unary(RELEASE.path)(b"", timeout=5) == b""
        await server.stop()
        return caught.value

    error = asyncio.run(run())
    assert error.code() is grpc.StatusCode.INTERNAL
    assert error.details() == "the sidecar has a bug, see its log"
    assert "boom" in caplog.text
    text = asyncio.run(render(metrics, {})).decode()
    assert 'lmcache_requests_total{code="INTERNAL",method="Lookup"} 1.0' in text
    assert 'lmcache_requests_total{code="OK",method="Release"} 1.0' in text
    assert 'lmcache_request_seconds_count{method="Release"} 1.0' in text
    assert 'lmcache_request_seconds_count{method="Lookup"}' not in text  # what was not done took no time


STATS = {
    "uptime_seconds": 1.5,
    "num_clients": {"attached": 2, "quarantined": 1},
    "memory": {"used_bytes": 4096, "removed": {"evicted": 3}},
    "disk": None,
    "remote": {"is_reachable": False, "writes": {"written": 7}},
}


def test_metrics_are_read_from_the_stats():
    text = asyncio.run(render(CallCounts(), STATS)).decode().splitlines()
    assert 'lmcache_clients{state="quarantined"} 1.0' in text
    assert "lmcache_memory_tier_bytes 4096.0" in text
    assert 'lmcache_memory_tier_removals_total{reason="evicted"} 3.0' in text
    assert 'lmcache_tier_writes_total{result="written",tier="remote"} 7.0' in text
    assert 'lmcache_tier_up{tier="remote"} 0.0' in text
    assert not [line for line in text if 'tier="disk"' in line]
    for family in FAMILIES:
        assert f"# TYPE {family.name} {'counter' if family.name.endswith('_total') else 'gauge'}" in text
        assert f"# HELP {family.name} {family.about}" in text


def test_the_text_reads_as_prometheus_reads_it():
    calls = CallCounts()
    for seconds in (0.0, 5e-5, 6e-5, 0.3, 7.0):
        calls.took("Lookup", seconds)
    calls.count("Lookup", grpc.StatusCode.OK)
    stats = STATS | {"remote": {"writes": {'a "quoted" \\ label\n': 1}}}
    text = asyncio.run(render(calls, stats)).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for family in families.values():
        assert family.documentation
        assert family.type in ("counter", "gauge", "histogram")
    (written,) = families["lmcache_tier_writes"].samples
    assert written.labels == {"tier": "remote", "result": 'a "quoted" \\ label\n'}
    seconds = families["lmcache_request_seconds"].samples
    buckets = {sample.labels["le"]: sample.value for sample in seconds if sample.name.endswith("_bucket")}
    assert (buckets["5e-05"], buckets["0.0001"], buckets["1.0"], buckets["+Inf"]) == (2, 3, 4, 5)
    assert {s.name[len("lmcache_request_seconds") :]: s.value for s in seconds[-2:]} == {
        "_count": 5,
        "_sum": 7.30011,
    }
    assert families["process_resident_memory_bytes"].samples[0].value > 1 << 20


def test_other_tasks_run_while_the_text_is_made():
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def run() -> None:
        task = asyncio.create_task(other())
        await render(CallCounts(), STATS)
        task.cancel()

    asyncio.run(run())
    assert turns >= len(FAMILIES)


def test_a_tier_s_counts_by_reason_are_json():
    remote = RemoteTier("unix:///nowhere")
    remote.stats.invalid["checksum"] += 2
    remote.stats.refused["OOM"] += 1
    found = json.loads(json.dumps(stats.tier_stats(Configured("nowhere", remote), None)))
    assert (found["invalid"], found["refused"]) == ({"checksum": 2}, {"OOM": 1})
    assert (found["operations"]["invalid"], found["operations"]["refused"]) == (2, 1)
