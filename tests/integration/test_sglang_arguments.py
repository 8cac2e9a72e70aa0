"""The arguments that the operator renders for SGLang, and the options of users that it refuses."""

import json
import os
import signal
from dataclasses import replace

import pytest

from lmcache_operator.api.parse import Platform, parse
from lmcache_operator.components.engine.kinds.base import option_name
from lmcache_operator.components.engine.kinds.sglang import SGLang
from testing.child_process import wait_until
from testing.engine.process import EngineFailed
from testing.sglang.engine import SGLangEngine
from testing.sglang.program import Program
from tests.harness.operator.model import cluster
from tests.harness.sglang.world import load, new_prompt, store, wait_attached

pytestmark = [pytest.mark.sglang, pytest.mark.redis]
KIND = SGLang()
ENGINE = {"kind": KIND.name, "gpu": {"count": 2}, "parallelism": {"data": 2}}
CLUSTER = parse(cluster(engine=ENGINE, model={"revision": "main"}))
_OF_THE_TEST = {"model_path", "revision", "port", "served_model_name", "tp_size", "pp_size", "dp_size"}
"""Arguments that the test sets itself."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """All names of each option by name, and the values of the rendered arguments, as SGLang reads them."""
    log = tmp_path_factory.mktemp("sglang") / "log"
    with Program("the options", log, "tests.harness.sglang.options", KIND.args(CLUSTER, 60)) as program:
        return json.loads(program.finish().splitlines()[-1])


def test_every_name_of_a_reserved_option_is_refused(server):
    options = server["options"]
    for reserved in (KIND.reserved, KIND.reserved_by_injection):
        assert set(reserved) - {"--"} <= options.keys()
        names = {name for option in reserved if option != "--" for name in options[option]}
        assert names <= set(reserved)


def test_other_options_are_not_refused(server):
    """An unreserved option whose name is the beginning of a reserved one would be refused by mistake."""
    for name in server["options"]:
        assert KIND.flag_of(name) == name
        added = [option_name(arg) for arg in KIND.cache_args(CLUSTER)]
        begun = [option for option in (*KIND.reserved_by_injection, *added) if option.startswith(name)]
        assert not begun or name in begun


def test_server_reads_the_rendered_arguments(server):
    parsed = server["parsed"]
    for arg in KIND.args(CLUSTER, 60):
        name, has_value, value = arg.partition("=")
        destination = name.removeprefix("--").replace("-", "_")
        assert parsed[destination] == (value if has_value else "True")


def test_server_with_the_rendered_arguments_loads_and_finishes_its_requests(sglang, tmp_path):
    """SIGTERM ends no request. The kubelet reaches the pod by IPv6."""
    arguments = {}
    for arg in KIND.args(replace(CLUSTER, platform=Platform(primary_host="::")), 60):
        name, has_value, value = arg.removeprefix("--").partition("=")
        arguments[name.replace("-", "_")] = value if has_value else True
    arguments = {name: value for name, value in arguments.items() if name not in _OF_THE_TEST}
    environment = {"LMCACHE_SOCKET": str(sglang.sidecar.socket_path), **sglang.storage.environment}
    with SGLangEngine(tmp_path / "log", environment=environment, **arguments) as engine:
        engine.wait_ready()
        wait_attached(engine, sglang.sidecar)
        prompt = new_prompt(600)
        (cold,) = store(engine, prompt)
        loaded = load(engine, prompt)
        assert loaded.cached["storage"] == 576
        assert loaded.tokens == cold.tokens

        pending = engine.start_generate(new_prompt(64), 300)
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
