"""Samples of requests that a real sidecar serves over HTTP."""

import json
import urllib.error

import pytest

from lmcache_client.rpc.hello import Role
from testing.processes import SidecarProcess
from tests.harness.engine import report
from tests.harness.sidecar.samples import Watch
from tests.harness.sidecar.wire import attached, make_keys


def test_only_scheduled_requests_are_sampled_and_only_once(sidecar, scheduler):
    watch = Watch(sidecar)
    for _ in range(3):
        scheduler.lookup("r", [(0, make_keys(1, 2, 3))], hint=True)
        scheduler.lookup("r", [(0, make_keys(1, 2))])
    report(scheduler, "r", 1, 2, 3, num_engine_chunks=1, num_hit_chunks=2, num_loaded_tokens=256)
    (request,) = watch.next(1)
    names = [int.from_bytes(make_keys(number)[-8:], "big") for number in (3, 2, 1)]
    assert (request.keys, request.tiers) == (names, "-me")
    lookups = sidecar.stats()["lookups"]
    assert (lookups["num_lookups"], lookups["lookup_tokens"]) == (1, 3 * 256)
    assert lookups["hit_tokens"] == {"engine": 256, "memory": 256}
    assert 'lmcache_hit_tokens_total{tier="engine"} 256.0' in sidecar.get("/metrics")
    assert "lmcache_lookup_tokens_total 768.0" in sidecar.get("/metrics")


def test_restarted_sidecar_starts_a_new_ring(sidecar, connect):
    client = connect(Role.SCHEDULER)
    old_session = attached(client)
    report(old_session, "r", 1, 2)
    first_answer = json.loads(sidecar.get("/samples"))
    sidecar.restart()
    scheduler = attached(client, newer_than=old_session)
    for request in range(5):
        report(scheduler, str(request), 7, 8)
    second_answer = json.loads(sidecar.get(f"/samples?since={first_answer['next']}"))
    assert second_answer["started"] > first_answer["started"]
    assert len(json.loads(sidecar.get("/samples"))["num"]) == 5


def test_samples_are_unavailable_until_the_sidecar_is_ready():
    with SidecarProcess(memory_size="900Ti", stay_up="true") as sidecar:
        with pytest.raises(urllib.error.HTTPError) as refused:
            sidecar.get("/samples")
        assert refused.value.code == 503
        assert refused.value.read()
