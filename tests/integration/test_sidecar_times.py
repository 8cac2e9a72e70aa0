"""Times of requests over the wire, and in ``/metrics``."""

import json

from lmcache_client.rpc.hello import Role
from lmcache_client.rpc.times import RequestTimes
from testing.processes import SidecarProcess
from tests.harness.commands.sidecar_command import explain
from tests.harness.engine import report
from tests.harness.sidecar.wire import attached

TIMES = RequestTimes("cmpl-1", 0.0004, 0.2, 0.03, 1.5)


def report_loaded(scheduler, request: str, *numbers: int, num_loaded: int = 0) -> None:
    counts = {"num_hit_chunks": num_loaded, "num_loaded_tokens": 256 * num_loaded, "reports_times": True}
    report(scheduler, request, *numbers, prefill_rate=1024.0, **counts)


def newest(sidecar: SidecarProcess) -> dict:
    return json.loads(sidecar.get("/requests"))["requests"][0]


def test_times_are_remembered_with_the_request(sidecar, scheduler):
    report_loaded(scheduler, "cmpl-1", 1, 2, 3, num_loaded=2)
    assert newest(sidecar)["lookup_seconds"] is None
    scheduler.release(["cmpl-1"], times=[TIMES])
    assert newest(sidecar) | {"time": 0} == {
        "time": 0,
        "request_id": "cmpl-1",
        "tokens": {"memory": 512, "new": 256, "tail": 5},
        "tenant": "default",
        "common_tokens": 512,
        "lookup_seconds": 0.0004,
        "wait_seconds": 0.2,
        "load_seconds": {"memory": 0.03},
        "first_token_seconds": 1.5,
    }
    _, shown = explain(sidecar, "--request-id", "1")
    expected = "Time: lookup 0.4ms, wait 200ms, load from memory tier 30ms, arrival to first token 1.5s."
    assert expected in shown.splitlines()


def test_tokens_of_a_killed_engine_are_counted(sidecar, connect):
    client = connect(Role.SCHEDULER)
    report_loaded(attached(client), "cmpl-1", 1, 2, 3, num_loaded=3)
    assert sidecar.stats()["causes"]["prompt_tokens"] == 0
    client.close()
    sidecar.wait_until(lambda stats: stats["causes"]["cause_tokens"] == {"memory": 768, "tail": 5})
