"""Samples of requests that a real sidecar serves over HTTP."""

import json
import urllib.error

import pytest

from lmcache_client.rpc.hello import Role
from testing.processes import SidecarProcess
from tests.harness.engine import report
from tests.harness.sidecar.wire import attached


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
