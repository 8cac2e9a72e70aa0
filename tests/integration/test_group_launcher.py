"""Launchers of a group as real processes with real sockets. A small program takes the place of vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_client.group import channel, links
from lmcache_client.group.channel import LinkError, PartIdentity
from lmcache_client.group.settings import Settings, read
from testing.child_process import free_port, wait_until
from tests.harness.group_processes import Maker, PartProcess, groups, is_alive, port_of, start


@pytest.fixture
def make_group(tmp_path: Path) -> Iterator[Maker]:
    """See ``groups``."""
    with groups(tmp_path) as make:
        yield make


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


def test_pods_without_a_server_answer_as_the_leader_and_end_after_it(make_group: Maker) -> None:
    """vLLM's ranks span both pods. Its server is in the first one, and needs the other one in a drain."""
    parts = leader, follower = make_group(mode="drains")
    port = int(leader.environ["LMCACHE_GROUP_SERVER_PORT"])
    for part, address in zip(parts, ("127.0.0.2", "127.0.0.3"), strict=True):
        changes = {"LMCACHE_GROUP_LEADER": "127.0.0.2", "LMCACHE_GROUP_RANKS": "0", "VLLM_HOST_IP": address}
        part.environ |= changes
    follower.start()
    limit = resource.prlimit(follower.pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(follower.pid, resource.RLIMIT_NOFILE, (256, limit))
    leader.start()
    for part in parts:
        part.wait_running()
    assert follower.engine["arguments"][-2:] == ["--headless", "--api-server-count=0"]
    assert asked("127.0.0.3", port) == b"", "the leader's server has not started"
    with socket.create_server(("127.0.0.2", port)) as server, contextlib.ExitStack() as idle:
        server.settimeout(20)
        for _ in range(200):  # idle clients take no connection away from probes
            idle.enter_context(socket.create_connection(("127.0.0.3", port)))
            idle.enter_context(server.accept()[0])
        for address in ("127.0.0.3", "127.0.0.1"):  # other containers and port-forwards use the second one
            answers = threading.Thread(target=answer_once, args=(server,), daemon=True)
            answers.start()
            assert asked(address, port) == b"HTTP/1.1 200 OK"
            answers.join()
    os.kill(follower.pid, signal.SIGTERM)
    wait_until(lambda: leader.signals == "T")
    assert (follower.signals, follower.is_ready) == ("", False)
    os.kill(leader.engine["pid"], signal.SIGUSR2)
    assert leader.wait() == 1
    wait_until(lambda: follower.signals == "T")
    os.kill(follower.engine["pid"], signal.SIGUSR2)
    assert follower.wait() == 0


def asked(address: str, port: int) -> bytes:
    """Send a request, and return the first bytes of the answer."""
    with socket.create_connection((address, port)) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        return connection.recv(15)
    return b""


def answer_once(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        assert connection.recv(4096).startswith(b"GET /health")
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")


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
