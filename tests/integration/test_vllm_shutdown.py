"""An engine that gets SIGTERM while it answers: with the rendered options, it finishes the answer."""

import json
import os
import signal
import urllib.request

import pytest
from lmcache_operator.api.parse import parse
from lmcache_operator.components.base import Context
from lmcache_operator.components.engine.engine import Engine
from lmcache_operator.specs.names import STOCK_IMAGES

from testing.child_process import free_ports
from testing.engine.process import ServedEngine
from tests.harness.operator_model import cluster

pytestmark = pytest.mark.vllm

NUM_TOKENS = 500


def rendered_timeout() -> str:
    stateful_set = Engine().render(parse(cluster()), Context(STOCK_IMAGES))[-1]
    args = stateful_set["spec"]["template"]["spec"]["containers"][0]["args"]
    (timeout,) = [arg for arg in args if arg.startswith("--shutdown-timeout=")]
    return timeout


def test_terminated_engine_finishes_its_streams(tmp_path):
    (port,) = free_ports(1)
    with ServedEngine(tmp_path / "vllm.log", port, None, rendered_timeout()) as engine:
        engine.wait_ready()
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": NUM_TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        request = urllib.request.Request(
            f"{engine.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            lines = (line for line in answer if line.startswith(b"data: "))
            assert b'"finish_reason":null' in next(lines)  # the answer has begun
            os.kill(engine.pid, signal.SIGTERM)
            *_, usage, end = lines
        assert end.strip() == b"data: [DONE]"
        assert json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"] == NUM_TOKENS
        assert engine.wait() == 0
