"""``lmcache-sidecar top`` with a real sidecar and its traffic."""

import json

import pytest

from testing.child_process import free_port, wait_until
from tests.harness.commands.sidecar_command import run_command
from tests.harness.commands.traffic import traffic


def test_rates_are_those_of_the_counters(sidecar):
    def figures_of_requests():
        before = sidecar.stats()
        _, text = run_command("top", "--url", sidecar.url, "--interval", "1", "-o", "json")
        (pod,) = json.loads(text)["pods"]
        return (json.loads(text), pod, before) if pod.get("requestsPerSecond") else None

    with traffic(sidecar):
        figures, pod, before = wait_until(figures_of_requests)
        after = sidecar.stats()
    num_requests = after["lookups"]["num_lookups"] - before["lookups"]["num_lookups"]
    assert figures["version"] == 1
    assert pod["requestsPerSecond"] < 1.1 * num_requests, "its interval of a second is part of this one"
    tokens = pod["tokensPerSecond"]
    assert tokens["memory"] == pytest.approx(256 * pod["requestsPerSecond"], rel=0.01)
    assert tokens["computed"] == pytest.approx(256 * pod["requestsPerSecond"], rel=0.01)
    (memory,) = pod["tiers"]
    row_bytes = after["memory"]["used_bytes"] / after["memory"]["used_rows"]
    # A request whose row is not stored yet may be counted. Its share of the rate is larger than a row if the
    # interval is shorter than a second.
    expected = row_bytes * pod["requestsPerSecond"]
    assert memory["writeBytesPerSecond"] == pytest.approx(expected, abs=1.1 * row_bytes)


def test_server_that_does_not_answer_is_named():
    status, text = run_command("top", "--url", f"http://127.0.0.1:{free_port()}", "--interval", "1")
    assert status == 1
    assert "Connection refused" in text
