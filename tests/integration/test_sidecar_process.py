"""The sidecar's process with invalid options, hostile clients and hanging parts: it answers its probes,
reports the reason, and ends on SIGTERM.
"""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from lmcache_client.rpc import service
from lmcache_client.rpc.service import LOOKUP, UNARY_METHODS
from testing.child_process import SOURCES, ProcessDied, answers, free_port, wait_until
from testing.processes import STARTED, SidecarProcess
from tests.harness.sidecar.wire import RawClient


@pytest.fixture(scope="module", autouse=True)
def _forked_engines() -> None:
    """Start each sidecar with an interpreter of its own, as in a pod."""


def ask(port: int, path: str) -> tuple[int, str] | None:
    """Status and text of a page. None if nothing answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    return None


def wait_ready(sidecar: SidecarProcess) -> None:
    wait_until(lambda: ask(sidecar.http_port, "/readyz") == (200, "ready\n"), timeout=60)


# ---- stay up without being able to serve ----


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"memory_size": "4Gb"}, "--memory-size: '4Gb' is not a size"),
        (
            {"remote_url": "redis://:S3cr3t@h:99999"},
            "--remote-url: remote URL: the host or port can't be read",
        ),
        ({"remote_password_file": "/x"}, "--remote-password-file need --remote-url"),
        ({"memory_size": "900Ti"}, "--arena: "),
        ({"arena": "/nowhere/arena"}, "--arena: /nowhere is not a directory"),
        ({"numa_node": 1023}, "--arena: "),
        ({"config": "/nowhere/sidecar.yaml"}, "/nowhere/sidecar.yaml can't be read"),
    ],
)
def test_sidecar_that_cannot_serve_is_up_and_not_ready(options, reason):
    with SidecarProcess(stay_up="true", **options) as sidecar:
        assert sidecar.get("/healthz") == "ok\n"
        status, reported = ask(sidecar.http_port, "/readyz")
        assert (status, reason in reported) == (503, True), reported
        stats = sidecar.stats()
        assert (stats["is_ready"], stats["not_ready_reason"]) == (False, reported.strip())
        assert "\nlmcache_ready 0.0\n" in sidecar.get("/metrics")
        assert sidecar.log.count(reported.strip()) == 1
        assert "S3cr3t" not in sidecar.log + reported
        assert "Traceback" not in sidecar.log
        assert not os.path.exists(sidecar.socket_path)
        assert sidecar.terminate() == 0


def test_sidecar_serves_once_its_problem_is_solved():
    with SidecarProcess(stay_up="true") as sidecar:
        sidecar.kill()
        Path(sidecar.socket_path).unlink()
        Path(sidecar.socket_path).write_text("not a socket")
        sidecar.start()
        assert "exists and is not a socket" in sidecar.stats()["not_ready_reason"]
        Path(sidecar.socket_path).unlink()
        sidecar.wait_until(lambda stats: stats["is_ready"])
        with RawClient(sidecar) as client:
            client.attach()
        wait_ready(sidecar)
        assert "\nlmcache_ready 1.0\n" in sidecar.get("/metrics")


def test_corrected_file_is_read_again_and_options_of_a_newer_operator_are_ignored(tmp_path):
    path = tmp_path / "sidecar.yaml"
    newer = "something_newer: {a: [b]}\n"
    path.write_text(f"drain_grace_seconds: soon\n{newer}")
    with SidecarProcess(stay_up="true", config=path, newer_flag="secret") as sidecar:
        assert "'soon' is not a number of seconds" in sidecar.stats()["not_ready_reason"]
        path.write_text(f"drain_grace_seconds: 5\n{newer}")
        wait_ready(sidecar)
        assert "key 'something_newer' is unknown, and ignored" in sidecar.log
        assert "argument --newer-flag is unknown" in sidecar.log
        assert "secret" not in sidecar.log


# ---- restarts, as in the sidecar's image ----


@pytest.fixture
def supervised() -> Iterator[SidecarProcess]:
    sidecar = SidecarProcess(http_port=free_port())
    sidecar.environment = {"LMCACHE_STAY_UP": "true"}
    with sidecar:
        wait_ready(sidecar)
        yield sidecar


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_sidecar_that_dies_is_restarted(supervised, number):
    first_pid = supervised.stats()["pid"]
    assert first_pid != supervised.pid
    os.kill(first_pid, number)
    wait_until(lambda: f"ended by signal {number.value}: restarting it" in supervised.log, timeout=60)
    wait_ready(supervised)
    assert supervised.stats()["pid"] != first_pid
    with RawClient(supervised) as client:
        client.attach()
    assert supervised.terminate() == 0


def test_sigterm_ends_a_sidecar_that_waits_for_its_restart(supervised):
    os.kill(supervised.stats()["pid"], signal.SIGKILL)
    wait_until(lambda: "restarting it" in supervised.log, timeout=60)
    assert supervised.terminate() == 0


BROKEN = "raise ImportError('no such library')"
HUNG = "import sys, threading; print('imported', file=sys.stderr, flush=True); threading.Event().wait()"
FLOOD = """
import socket, sys, threading
def connect():
    while True:
        try:
            socket.create_connection(("127.0.0.1", int(sys.argv[1])), 1).recv(1)
        except OSError:
            pass
for _ in range(15):
    threading.Thread(target=connect, daemon=True).start()
threading.Event().wait()
"""


@contextlib.contextmanager
def supervised_import(folder: Path, code: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The parent of a sidecar that runs ``code`` when it imports gRPC. The output of both is in ``log``."""
    (folder / "grpc.py").write_text(code)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", ""), *sys.path])
    environment = os.environ | {"LMCACHE_STAY_UP": "true", "LMCACHE_HTTP_PORT": f"{port}", "PYTHONPATH": path}
    with (folder / "log").open("wb") as errors:
        command = [sys.executable, "-m", "lmcache_sidecar", "serve"]
        parent = subprocess.Popen(command, env=environment, stderr=errors)
    try:
        yield parent
    finally:
        parent.kill()
        parent.wait()


def test_sigterm_ends_a_sidecar_that_does_not_handle_signals_yet(tmp_path):
    with supervised_import(tmp_path, HUNG, free_port()) as parent:
        wait_until(lambda: "imported" in (tmp_path / "log").read_text())
        parent.terminate()
        assert parent.wait(timeout=60) == 0


def test_sidecar_that_dies_before_it_listens_answers_probes(tmp_path):
    """Otherwise the kubelet ends the container and marks the pod as not ready, for up to five minutes."""
    port = free_port()

    def num_ends() -> int:
        return (tmp_path / "log").read_text().count("the sidecar ended with exit status 1: restarting it")

    with supervised_import(tmp_path, BROKEN, port) as parent:
        for number in (1, 2, 3):
            wait_until(lambda number=number: num_ends() >= number, timeout=60)
            wait_until(lambda: ask(port, "/healthz") == (200, "ok\n"), timeout=60)
        wait_until(lambda: answers(f"http://[::1]:{port}/healthz"), timeout=60)
        status, reason = wait_until(lambda: ask(port, "/readyz"), timeout=60)
        assert (status, reason[:42]) == (503, "the sidecar ended with exit status 1: rest")
        stats = json.loads(wait_until(lambda: ask(port, "/stats"), timeout=60)[1])
        assert (stats["is_ready"], stats["not_ready_reason"][:36]) == (False, reason[:36])
        flood = subprocess.Popen([sys.executable, "-c", FLOOD, f"{port}"])  # clients that send nothing
        try:
            parent.terminate()
            assert parent.wait(timeout=60) == 0
        finally:
            flood.kill()
            flood.wait()


def test_sidecar_ends_with_its_parent(supervised):
    child = supervised.stats()["pid"]
    supervised.kill()
    wait_until(lambda: not Path(f"/proc/{child}/cmdline").exists(), timeout=60)


def test_sidecar_exits_when_stay_up_is_revoked(supervised):
    supervised.options |= {"stay_up": "false", "memory_size": "4Gb"}
    supervised.kill()
    with pytest.raises(ProcessDied, match="exited with 2"):
        supervised.start()


# ---- invalid bytes ----


def test_bytes_that_are_no_message_are_refused_with_few_log_lines(sidecar):
    with RawClient(sidecar) as client:
        client.attach()
        channel = grpc.insecure_channel(f"unix:{sidecar.socket_path}")
        calls = [channel.unary_unary(method.path, None, None) for method in UNARY_METHODS]
        stream = channel.stream_stream(service.ATTACH_PATH, None, None)
        for call in calls * 40:
            with pytest.raises(grpc.RpcError) as caught:
                call(b"\xff\xff\xff", timeout=60)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert stream(iter([b"\xff\xff\xff"]), timeout=60).code() is grpc.StatusCode.INVALID_ARGUMENT
        channel.close()
        assert 'code="INVALID_ARGUMENT",method="Lookup"} 40.0' in sidecar.get("/metrics")
    assert f"A client sent 3 bytes that are not a valid {LOOKUP.request.__name__}" in sidecar.log
    assert 1 <= sidecar.log.count("A client sent 3 bytes") <= 100
    assert "Traceback" not in sidecar.log


@pytest.fixture
def few_descriptors():
    sidecar = SidecarProcess()
    sidecar.max_descriptors = 64
    with sidecar:
        yield sidecar


def test_probes_are_answered_without_free_descriptors(few_descriptors):
    fds = f"/proc/{few_descriptors.pid}/fd"
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.connect(few_descriptors.socket_path)
        wait_until(lambda: len(os.listdir(fds)) >= few_descriptors.max_descriptors)
        for _ in range(20):
            assert few_descriptors.get("/healthz") == "ok\n"
        for _ in range(20):  # idle connections to the HTTP server
            stack.enter_context(socket.create_connection(("127.0.0.1", few_descriptors.http_port)))
        assert few_descriptors.get("/healthz") == "ok\n"
    assert len(few_descriptors.log) < 4000
    wait_until(lambda: len(os.listdir(fds)) < few_descriptors.max_descriptors)


# ---- files of other processes in its directory ----


def test_stale_lock_files_do_not_prevent_the_start(few_descriptors):
    with RawClient(few_descriptors) as client:
        client.attach()
        few_descriptors.kill()
        clients = few_descriptors.folder / "clients"
        for number in range(200):
            (clients / f"{number:032x}.lock").touch()
        (clients / f"{'d' * 32}.lock").mkdir()
        few_descriptors.start()
        stats = few_descriptors.wait_until(lambda stats: stats["num_previous_clients"] == 1 and stats)
        assert stats["is_ready"]  # only the live client is left, dead ones are removed
        assert "1 entries of" in few_descriptors.log
        assert [path.name for path in clients.glob("00000000*.lock")] == []


# ---- its end ----

HANGING = """
import asyncio, logging, sys, threading
from concurrent.futures import ThreadPoolExecutor
from lmcache_sidecar.sidecar import Sidecar
from lmcache_sidecar.command import main

async def stop(self):
    if "log" in sys.argv[1]:
        threading.Thread(target=logging.getLogger().handlers[0].acquire).start()
    if "pool" in sys.argv[1]:
        ThreadPoolExecutor().submit(threading.Event().wait)
    if "loop" in sys.argv[1]:
        threading.Event().wait()

if "open" in sys.argv[1]:
    Sidecar.__init__ = lambda *_: threading.Event().wait()
Sidecar.stop = stop
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(("part", "status"), [("pool", 0), ("loop", 0), ("log and loop", 1)])
def test_sigterm_ends_a_sidecar_with_a_hanging_part(tmp_path, part, status):
    with hanging(tmp_path, part) as process:
        wait_for_port(process)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert process.returncode == status
    assert ("did not stop in time" in log) == (status == 0)


SLOW_EXIT = """
import runpy, sys, time

class Slow:
    def __del__(self, sleep=time.sleep):  # other threads cannot run any more
        sleep(30)

sys.slow = Slow()
runpy.run_module("PROGRAM", run_name="__main__")
"""


@pytest.mark.parametrize("program", ["lmcache_sidecar", "lmcache_sidecar.command"])
def test_stopped_sidecar_exits_with_status_0_even_if_its_interpreter_is_slow(tmp_path, program):
    with hanging(tmp_path, "", SLOW_EXIT.replace("PROGRAM", program)) as process:
        wait_for_port(process)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert "Stopped" in log
    assert process.returncode == 0, log


def hanging(tmp_path: Path, part: str, program: str = HANGING) -> subprocess.Popen[str]:
    flags = ["--socket", str(tmp_path / "s.sock"), "--http-port=0", "--drain-grace-seconds=0"]
    return subprocess.Popen(
        [sys.executable, "-c", program, *([part] if part else []), "serve", *flags],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": SOURCES},
    )


def wait_for_port(process: subprocess.Popen[str]) -> int:
    return next(int(match[1]) for line in process.stderr if (match := re.search(r"http port (\d+)", line)))


def test_probes_are_answered_while_the_arena_hangs(tmp_path):
    with hanging(tmp_path, "open") as process:
        line = next(line for line in process.stderr if "http port" in line)
        assert not STARTED.search(line), "tests of a slow machine wait for the end of this start"
        (port,) = map(int, re.findall(r"http port (\d+)", line))
        assert ask(port, "/healthz") == (200, "ok\n")
        answer = ask(port, "/readyz")
        assert answer
        assert answer[0] == 503
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0
