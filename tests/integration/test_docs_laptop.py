"""The commands of "Get started on a laptop", on a real sidecar and a real vLLM."""

import contextlib
import json
import os
import re
import signal
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from testing.child_process import ChildProcess, free_ports, wait_until
from testing.engine import fork_server
from tests.harness.commands.terminal import Terminal
from tests.harness.fences import COMMANDS, DOCS, Fence, difference, fences

pytestmark = [pytest.mark.vllm, pytest.mark.rotating("file")]

PAGE = DOCS / "get-started" / "laptop.md"
# The reader starts both servers in terminals of their own.
_SIDECAR = """if [[ "$1" = serve ]]; then
  command lmcache-sidecar "$@" --http-port {port} >{log} 2>&1 &
  echo $! >{pid}
  sed '/http port/q' <(command tail --pid $! -F -n +1 {log} 2>/dev/null)
else
  command lmcache-sidecar "$@" --url http://localhost:{port}
fi"""
_VLLM = '{python} -c "{program}" {file} "$@"'
_RECORD = "import json, os, sys; json.dump([sys.argv[2:], dict(os.environ)], open(sys.argv[1], 'w'))"


class Engine(ChildProcess):
    """``vllm`` with the arguments and the environment of the page, as a copy of the tests' engine."""

    def __init__(self, recorded: Path, port: int, log: Path) -> None:
        super().__init__("vllm serve", log)
        self._recorded, self._port = recorded, port

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        arguments, variables = json.loads(self._recorded.read_text())
        assert variables.get("PYTHONHASHSEED") == "0"  # the copy has it in any case
        serve = [*arguments, "--host", "127.0.0.1", "--port", str(self._port)]
        options = {"cwd": os.getcwd(), "env": variables, "start_new_session": True}
        log_start = len(self.log)
        self.adopt(fork_server.start("vllm.entrypoints.cli.main", serve, self.log_path, **options))

        def is_ready() -> bool:
            self.check()
            return "Application startup complete" in self.log[log_start:]

        wait_until(is_ready, timeout=300)

    def stop(self) -> None:
        """Ctrl-C."""
        group = self.pid
        self.interrupt()
        with contextlib.suppress(ProcessLookupError):  # its engine core may be late
            os.killpg(group, signal.SIGKILL)


def test_get_started_on_a_laptop(tmp_path):
    http_port, api_port = free_ports(2)
    shared = Path("/dev/shm") / f"docs-{os.getpid()}"
    recorded, pid, sidecar_log = tmp_path / "vllm.json", tmp_path / "sidecar.pid", tmp_path / "sidecar.log"
    commands = [fence for fence in fences(PAGE, *COMMANDS) if not fence.reason]
    engine = Engine(recorded, api_port, tmp_path / "engine.log")
    printed: list[str] = []
    with engine, Terminal(tmp_path, [], {}) as terminal:
        terminal.define(
            {
                "lmcache-sidecar": _SIDECAR.format(port=http_port, log=sidecar_log, pid=pid),
                "vllm": _VLLM.format(python=sys.executable, program=_RECORD, file=recorded),
            }
        )
        terminal.words |= {
            "/dev/shm/kv-$USER": str(shared),
            "localhost:8000": f"localhost:{api_port}",
            "localhost:9464": f"localhost:{http_port}",
        }
        for fence in commands:
            if is_second_question(fence, printed):
                engine.stop()
                engine.start()
            if "rm -r" in fence.text:
                engine.stop()
                stats = json.load(urlopen(f"http://localhost:{http_port}/stats"))
                os.kill(int(pid.read_text()), signal.SIGTERM)
            printed.append(terminal.run(fence))
            if "vllm serve" in fence.text:
                engine.start()
                assert fence.output
                assert not difference(fence.output.text, engine.log)
    first, second = (text for text in printed if "real" in text)
    assert cached_tokens(first) == 0
    promised = [fence.output.text for fence in commands if fence.output and "time ask" in fence.text][-1]
    assert cached_tokens(second) == cached_tokens(promised) == 31 * 256
    assert stats["memory"]["used_rows"] == 31
    assert not shared.exists()


def is_second_question(fence: Fence, printed: list[str]) -> bool:
    """Whether the page asks the long prompt again."""
    return "time ask" in fence.text and any("real" in text for text in printed)


def cached_tokens(printed: str) -> int:
    """Number of cached tokens of the last request."""
    return int(re.findall(r"cached: (\d+)", printed)[-1])
