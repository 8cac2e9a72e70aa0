"""A real SGLang server with the arguments that the operator renders, and a real sidecar."""

from __future__ import annotations

import os
import signal

import pytest
from lmcache_operator.api.parse import parse
from lmcache_operator.components.engine.kinds.sglang import SGLang

from testing.child_process import wait_until
from testing.engine.process import EngineFailed
from testing.processes import SidecarProcess
from testing.sglang.engine import SGLangEngine, make_prompt
from tests.harness.operator_model import cluster

pytestmark = pytest.mark.sglang
_OF_THE_TEST = {"model_path", "host", "port", "served_model_name", "tp_size", "pp_size"}
"""Arguments that the test sets itself."""


def rendered_arguments() -> dict[str, str | bool]:
    """The arguments of an engine container, by their names."""
    arguments: dict[str, str | bool] = {}
    for arg in SGLang().args(parse(cluster(engine={"kind": "SGLang"})), 60):
        name, has_value, value = arg.partition("=")
        arguments[name.removeprefix("--").replace("-", "_")] = value if has_value else True
    return {name: value for name, value in arguments.items() if name not in _OF_THE_TEST}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    log = tmp_path_factory.mktemp("sglang") / "log"
    with SidecarProcess() as sidecar:
        environment = {"LMCACHE_SOCKET": str(sidecar.socket_path)}
        with SGLangEngine(log, environment=environment, **rendered_arguments()) as server:
            server.wait_ready()
            sidecar.wait_until(lambda stats: stats["num_clients"]["attached"], timeout=60)
            yield server


def test_rendered_arguments_give_the_engine_its_cache(engine):
    prompt = make_prompt(1024)
    first = engine.generate(prompt)
    engine.wait_stored(1024)
    engine.flush_cache()
    second = engine.generate(prompt)
    assert second.cached["storage"] == 960  # SGLang always computes the last page
    assert second.tokens == first.tokens


def test_terminating_engine_finishes_its_requests(engine):
    """Without a request in progress, nothing would show that SIGTERM does not end requests."""
    pending = engine.start_generate(make_prompt(64, "last"), 300)
    running = "sglang:num_running_reqs"
    wait_until(lambda: engine.metrics(running).get(running, 0) > 0, what="the request runs")
    os.kill(engine.pid, signal.SIGTERM)

    def is_unready() -> bool:
        try:
            engine.request("GET", "/health")
        except EngineFailed as error:
            return "HTTP 503" in str(error)
        return False

    wait_until(is_unready, what="/health reports the end")
    assert len(pending.wait().tokens) == 300
    assert engine.wait(timeout=60) == 0
