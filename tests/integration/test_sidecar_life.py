"""The sidecar as a process: its HTTP pages, its files, its start and its end."""

import gc
import os
import re
import socket
import urllib.error
import weakref

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lmcache_client.rpc.client import SidecarClient
from lmcache_client.rpc.errors import SidecarUnavailableError
from testing.child_process import ProcessDied, wait_until
from testing.deadlines import CALLS
from testing.processes import SidecarProcess
from tests.harness.sidecar.wire import attached, make_hello, make_keys, usable

DEADLINES = CALLS


def test_http_pages_report_health_readiness_and_metrics(sidecar, connect):
    attached(connect())
    usable(sidecar)
    assert sidecar.get("/healthz") == "ok\n"
    assert sidecar.get("/readyz") == "ready\n"
    metrics = sidecar.get("/metrics")
    for name in re.findall(r"^# TYPE (\S+) counter", metrics, re.MULTILINE):
        assert name.endswith("_total")
    capacity_bytes = sidecar.stats()["memory"]["capacity_bytes"]
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
    }
    assert samples["lmcache_memory_tier_capacity_bytes",] == capacity_bytes
    assert samples["lmcache_clients", "attached"] == 1
    transfer = {"mode": "SharedMemory", "reason": "the engine copies: its KV is in host memory"}
    assert sidecar.stats()["clients"][0]["transfer"] == transfer
    with pytest.raises(urllib.error.HTTPError, match="404"):
        sidecar.get("/nothing")


def test_only_the_group_may_use_the_socket(sidecar):
    assert os.stat(sidecar.socket_path).st_mode & 0o777 == 0o660
    assert (sidecar.folder / "clients").stat().st_mode & 0o777 == 0o770


def refusal(**options) -> str:
    """The output of a sidecar that exits with status 2."""
    sidecar = SidecarProcess(**options)
    try:
        with pytest.raises(ProcessDied, match="exited with 2:"):
            sidecar.start()
        return sidecar.log
    finally:
        sidecar.close()


def test_second_sidecar_on_the_same_socket_or_arena_is_refused(sidecar):
    assert "is in use by a live sidecar" in refusal(socket=sidecar.socket_path)
    assert "in use by another sidecar" in refusal(arena=sidecar.arena_path)
    assert sidecar.get("/readyz") == "ready\n"


@pytest.mark.parametrize("ending", ["killed", "stopped", "unanswered"])
def test_engine_releases_the_arena_when_its_session_ends(sidecar, ending):
    """Immediately: garbage collection may be hours away, and a replaced arena stays in memory until then."""
    mappings = []
    client = SidecarClient(
        sidecar.socket_path, make_hello(), on_rows=lambda slots, *_: mappings.append(weakref.ref(slots.base))
    )
    gc.disable()
    try:
        client.start()
        session = attached(client)
        wait_until(lambda: mappings)
        if ending == "unanswered":
            sidecar.freeze()
            with pytest.raises(SidecarUnavailableError, match="was not answered"):
                session.reserve(0, make_keys(1), timeout=0.1)  # real time: the sidecar is frozen
        else:
            sidecar.kill() if ending == "killed" else sidecar.terminate()
        del session
        wait_until(lambda: client.session is None)
        wait_until(lambda: mappings[0]() is None, timeout=60, what="the mapping is freed")
    finally:
        gc.enable()
        client.close()


def test_sigint_ends_the_sidecar(sidecar):
    assert sidecar.interrupt() == 0
    with socket.socket(socket.AF_UNIX) as probe:
        assert probe.connect_ex(sidecar.socket_path)
