"""Launchers of a group as real processes with real sockets. A small program takes the place of vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_client.group import channel, links
from lmcache_client.group.channel import LinkError, PartIdentity
from lmcache_client.group.settings import Settings, read
from testing.child_process import SOURCES, ChildProcess, free_port, free_ports, wait_until

ENGINE = """
import json, os, signal, sys, time

folder, mode = sys.argv[1:3]

def note(word):
    with open(f"{folder}/signals", "a") as file:
        file.write(word)

def terminate(*_):
    note("T")
    if mode == "quick":
        sys.exit(0)

signal.signal(signal.SIGTERM, terminate)
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(0))
if (worker := os.fork()) == 0:  # it would end before its requests, as a worker of vLLM does
    signal.signal(signal.SIGTERM, lambda *_: note("W"))
    while True:
        signal.pause()
if os.fork() == 0:  # an orphan, which ends as a child of the first process
    os.setsid()
    os._exit(os.fork() and 0)
with open(f"{folder}/new", "w") as file:
    json.dump({"pid": os.getpid(), "worker": worker, "arguments": sys.argv[3:]}, file)
os.rename(f"{folder}/new", f"{folder}/started")
while True:
    signal.pause()
"""
PR_SET_CHILD_SUBREAPER = 36


class PartProcess(ChildProcess):
    """A launcher in a container of its own, which the test restarts."""

    def __init__(self, folder: Path, rank: int, environ: dict[str, str], mode: str) -> None:
        super().__init__(f"part-{rank}", folder / "log")
        self.folder, self.environ, self.mode = folder, environ | {"LMCACHE_GROUP_RANK": f"{rank}"}, mode

    def start(self) -> None:
        for leftover in ("started", "signals"):
            (self.folder / leftover).unlink(missing_ok=True)
        self.log_path.unlink(missing_ok=True)
        engine = [sys.executable, "-SE", self.folder.parent / "engine.py", self.folder, self.mode]
        argv = [sys.executable, "-m", "lmcache_client.group", "--", *engine]
        self.spawn(argv, env=self.environ, preexec_fn=adopt_orphans)

    @property
    def engine(self) -> dict[str, Any]:
        """The engine's pid, worker and arguments. Empty until it has started."""
        file = self.folder / "started"
        return dict(json.loads(file.read_text())) if file.exists() else {}

    @property
    def signals(self) -> str:
        file = self.folder / "signals"
        return file.read_text() if file.exists() else ""

    @property
    def children(self) -> list[int]:
        """Processes of the launcher: vLLM, and orphans that it has not reaped."""
        return [*map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split())]

    def kill(self) -> None:
        """End all processes, as a container ends with its first one."""
        children = self.children if self.is_running else []
        super().kill()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)

    @property
    def is_ready(self) -> bool:
        """Whether the readiness probe succeeds."""
        address = self.environ["VLLM_HOST_IP"], int(self.environ["LMCACHE_GROUP_READY_PORT"])
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(address) as probe:
            return probe.recv(1) == b""
        return False

    def wait_running(self) -> None:
        self._wait(lambda: self.engine)

    def wait_line(self, text: str) -> None:
        self._wait(lambda: text in self.log)

    def _wait(self, predicate: Callable[[], object]) -> None:
        def is_true() -> object:
            self.check()
            return predicate()

        wait_until(is_true, what=self.name)

    @property
    def last_line(self) -> str:
        return self.log.splitlines()[-1]


def adopt_orphans() -> None:
    """Make the launcher the parent of orphans, as the first process of a container is."""
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


Maker = Callable[..., list[PartProcess]]


@pytest.fixture
def make_group(tmp_path: Path) -> Iterator[Maker]:
    """A function that returns the launchers of a group, which do not run yet."""
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "secret").write_text("the secret of the group")
    with contextlib.ExitStack() as stack:

        def make(
            nodes: int = 2, mode: str = "quick", address: str = "127.0.0.1", name: str = "127.0.0.1"
        ) -> list[PartProcess]:
            environ = os.environ | {
                "PYTHONPATH": SOURCES,
                "LMCACHE_GROUP_NODES": f"{nodes}",
                "LMCACHE_GROUP_LEADER": name,
                "LMCACHE_GROUP_PORT": f"{free_port()}",
                "LMCACHE_GROUP_SECRET_FILE": f"{tmp_path / 'secret'}",
                "LMCACHE_GROUP_NOTICE_SECONDS": "0.1",
                "LMCACHE_GROUP_RANKS": "2",
                "LMCACHE_GROUP_SHUTDOWN_SECONDS": "600",
                "VLLM_HOST_IP": address,
            }
            parts = []
            for rank, port in enumerate(free_ports(nodes)):
                (folder := tmp_path / f"{rank}").mkdir()
                ready = {"LMCACHE_GROUP_READY_PORT": f"{port}"}
                parts.append(stack.enter_context(PartProcess(folder, rank, environ | ready, mode)))
            return parts

        yield make


def start(parts: list[PartProcess]) -> None:
    for part in parts:
        part.start()
    for part in parts:
        part.wait_running()


def port_of(part: PartProcess) -> int:
    return int(part.environ["LMCACHE_GROUP_PORT"])


@pytest.mark.parametrize(("address", "name"), [("127.0.0.1", "localhost"), ("::1", "::1")])
def test_all_parts_start_together_and_end_with_the_first(make_group: Maker, address: str, name: str) -> None:
    leader, follower = make_group(address=address, name=name)
    follower.start()
    follower.wait_line(f"Last problem: {name} port {port_of(leader)}: cannot connect: ")
    assert not follower.is_ready
    leader.start()
    for rank, part in enumerate((leader, follower)):
        part.wait_running()
        assert part.is_ready
        assert part.engine["arguments"] == [
            f"--data-parallel-address={address}",
            "--data-parallel-rpc-port=29550",
            "--data-parallel-size-local=2",
            f"--data-parallel-start-rank={2 * rank}",
            "--data-parallel-hybrid-lb",
        ]
    workers = [part.engine["worker"] for part in (leader, follower)]
    wait_until(lambda: leader.children == [leader.engine["pid"]], what="orphans of vLLM are reaped")
    os.kill(follower.engine["pid"], signal.SIGUSR1)
    assert (follower.wait(), leader.wait()) == (3, 1)
    cause = f"part 1 of 2 ({socket.gethostname()}) ended: vLLM exited with 3"
    assert (follower.last_line, leader.last_line) == (cause, f"error: {cause}")
    assert leader.signals == "T"
    wait_until(lambda: not any(map(is_alive, workers)))
    # The kubelet restarts both containers in place.
    start([leader, follower])
    os.kill(leader.engine["pid"], signal.SIGKILL)
    assert (leader.wait(), follower.wait()) == (137, 1)
    assert follower.last_line.endswith("ended: vLLM was killed by signal 9")


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_launcher_ends_the_other_parts(make_group: Maker, lost: int) -> None:
    parts = make_group(nodes=2)
    start(parts)
    survivor = parts[1 - lost]
    parts[lost].kill()
    assert survivor.wait() == 1
    assert survivor.last_line == f"error: part {lost} of 2 ({socket.gethostname()}) closed its link"


def test_a_frozen_part_ends_the_group_even_if_vllm_ignores_sigterm(make_group: Maker) -> None:
    leader, follower = make_group(mode="ignores")
    start([leader, follower])
    pids = [pid for part in (leader, follower) for pid in (part.engine["pid"], part.engine["worker"])]
    follower.freeze()
    assert leader.wait() == 1
    assert leader.last_line.endswith("was silent for 5 s")
    assert leader.signals == "T"
    follower.thaw()
    assert follower.wait() == 1
    wait_until(lambda: not any(map(is_alive, pids)))


def test_a_terminating_pod_lets_all_parts_finish_their_requests(make_group: Maker) -> None:
    parts = make_group(mode="drains", nodes=2)
    start(parts)
    leader, follower = parts
    os.kill(follower.pid, signal.SIGTERM)
    for part in parts:
        wait_until(lambda part=part: part.signals == "T")
    os.kill(follower.pid, signal.SIGTERM)
    os.kill(leader.engine["pid"], signal.SIGUSR2)
    assert leader.wait() == 1
    assert leader.last_line == f"error: part 1 of 2 ({socket.gethostname()}) was terminated"
    assert follower.is_running
    # The leader's container starts again, and waits for the pod that replaces the follower's.
    leader.start()
    leader.wait_line("waits for part")
    os.kill(follower.engine["pid"], signal.SIGUSR2)
    assert follower.wait() == 0
    assert follower.signals == "T"
    follower.start()
    for part in parts:
        part.wait_running()


def test_no_pod_is_ready_while_vllm_still_serves_before_a_drain(make_group: Maker) -> None:
    leader, follower = make_group()
    for part in (leader, follower):
        part.environ["LMCACHE_GROUP_NOTICE_SECONDS"] = "3600"
    start([leader, follower])
    os.kill(follower.pid, signal.SIGTERM)
    for part in (leader, follower):
        wait_until(lambda part=part: not part.is_ready)
        assert (part.signals, part.is_running) == ("", True)


def test_a_part_that_waits_ends_at_once_when_it_is_terminated(make_group: Maker) -> None:
    leader, follower = make_group()
    follower.environ["LMCACHE_GROUP_LEADER"] = "pod-0.does-not-exist.invalid"
    problem = f"Last problem: pod-0.does-not-exist.invalid port {port_of(leader)}: cannot connect: "
    for part, line in ((leader, "waits for part 1"), (follower, problem)):
        part.start()
        part.wait_line(line)
        assert part.terminate() == 0
        assert part.last_line.endswith("was terminated")


def test_invalid_settings_end_the_launcher_with_one_sentence(make_group: Maker) -> None:
    leader, _ = make_group()
    leader.environ["LMCACHE_GROUP_PORT"] = "0"
    leader.start()
    assert leader.wait() == 2
    assert leader.log == "error: LMCACHE_GROUP_PORT: '0' is not a port from 1 to 65535\n"
    leader.environ["LMCACHE_GROUP_PORT"] = f"{free_port()}"
    with socket.create_server(("127.0.0.1", port_of(leader))):
        leader.start()
        assert leader.wait() == 1
    assert f"error: cannot wait for other parts at 127.0.0.1 port {port_of(leader)}: " in leader.last_line


def settings_of(part: PartProcess) -> Settings:
    settings = read(part.environ, ["--", sys.executable])
    return settings._replace(identity=PartIdentity(1, 2, "-", "stranger"))


def refused(settings: Settings) -> str:
    """Try to join as a follower, and return why that fails."""
    return asyncio.run(refusal(settings))


async def refusal(settings: Settings) -> str:
    with pytest.raises(LinkError) as error:
        await links.in_time(links.join(settings))
    return str(error.value)


def test_strangers_neither_prevent_the_start_nor_end_the_group(make_group: Maker, tmp_path: Path) -> None:
    leader, follower = make_group()
    leader.start()
    leader.wait_line("waits for part")
    (tmp_path / "wrong").write_text("the secret of another group")
    address = ("127.0.0.1", port_of(leader))

    valid = settings_of(leader)
    assert refused(valid._replace(secret_file=tmp_path / "wrong")) == "closed its link"
    leader.wait_line("Last problem: 127.0.0.1: did not prove that it knows the group's secret")
    refusals = {
        "the first pod expects 2 pods of revision -, and this one 3 pods of revision -": {"nodes": 3},
        "the first pod expects 2 pods of revision -, and this one 2 pods of revision r2": {"revision": "r2"},
        "rank 0 is taken or too large": {"rank": 0},
    }
    for reason, changes in refusals.items():
        settings = valid._replace(identity=valid.identity._replace(**changes))
        assert refused(settings) == f"refuses this part, because {reason}"
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(300)]
        for number, connection in enumerate(silent):
            with contextlib.suppress(OSError):  # the leader may have closed it already
                connection.sendall(
                    [b"x" * 5000, b"\n", b"1 2 - a b\n0 join\n", b"\xff\0\n\n", b""][number % 5]
                )
        follower.start()
        for part in (leader, follower):
            part.wait_running()
        for connection in silent:
            connection.settimeout(60)
            with contextlib.suppress(ConnectionError):
                while connection.recv(4096):
                    pass
    with pytest.raises(ConnectionRefusedError):  # the port is open only while the group gathers
        socket.create_connection(address)
    assert leader.is_running
    assert follower.is_running


def test_the_older_of_two_parts_with_one_rank_remains(make_group: Maker) -> None:
    leader, *_ = make_group(nodes=3)
    leader.start()
    leader.wait_line("waits for part")
    valid = settings_of(leader)
    valid = valid._replace(identity=valid.identity._replace(nodes=3))

    async def scenario() -> None:
        *_, first = await links.in_time(links.join(valid))
        assert await refusal(valid) == "refuses this part, because rank 1 is taken or too large"
        first.close()
        *_, second = await links.in_time(links.join(valid))
        second.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (b"", "closed its link"),
        (b"SSH-2.0-OpenSSH\n", "does not speak lmcache-group/1"),
        (
            channel.greeting("pod-0", "2") + b"0 welcome\n",
            "did not prove that it knows the group's secret",
        ),
        (b"x" * 2000, "sent a line that is too long"),
    ],
)
def test_a_follower_starts_for_no_false_leader(make_group: Maker, lines: bytes, reason: str) -> None:
    valid = settings_of(make_group()[0])

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(lines)
        if lines:
            await reader.readline()
        writer.close()

    async def scenario() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", valid.port):
            assert (await refusal(valid)).startswith(reason)

    asyncio.run(scenario())


def test_a_leader_that_does_not_listen_yet_is_a_problem_of_the_kernel(make_group: Maker) -> None:
    assert refused(settings_of(make_group()[0])) == "cannot connect: Connection refused"
