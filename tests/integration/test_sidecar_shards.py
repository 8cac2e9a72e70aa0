"""A real sidecar that follows changes of the shard list."""

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from testing.certificates import make_certificates
from testing.child_process import wait_until
from testing.processes import BINARY, RedisProcess, SidecarProcess
from tests.harness.engine import check_promoted, restart_without_memory, session_of, store

pytestmark = pytest.mark.redis

CHUNKS = range(24)


class ShardsDocument:
    """The shard list as the kubelet writes it: a new file replaces the old one."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, current: list[RedisProcess], previous: Sequence[RedisProcess] = ()) -> None:
        until = (datetime.now(UTC) + timedelta(minutes=15)).isoformat()
        lists = [[f"127.0.0.1:{server.port}" for server in servers] for servers in (current, previous)]
        secure = [f"127.0.0.1:{server.port}" for server in current if server.tls]
        authorities = {str(server.tls.ca) for server in current if server.tls}
        tls = f"tls: {secure}\nca: {authorities.pop()}\n" if secure else ""
        self.write_text(f"current: {lists[0]}\nprevious: {lists[1]}\nuntil: {until}\n{tls}")

    def write_text(self, text: str) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(text)
        os.replace(new, self.path)


@pytest.fixture
def document(tmp_path: Path) -> ShardsDocument:
    return ShardsDocument(tmp_path / "shards.yaml")


@pytest.fixture
def servers() -> Iterator[list[RedisProcess]]:
    options = {"maxmemory": "64mb", "maxmemory_policy": "allkeys-lru"}
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(RedisProcess(**options)) for _ in range(3)]


def load_all(sidecar: SidecarProcess) -> None:
    with session_of(sidecar) as session:
        check_promoted(session, *CHUNKS)


def num_rows(server: RedisProcess) -> int:
    with server.client as client:
        return int(client.dbsize())


def test_adding_and_removing_shards_and_an_invalid_list_cost_no_hit(servers, document):
    document.write(servers[:2])
    url = "redis://127.0.0.1:1"  # no server listens here: the addresses come from the file
    with SidecarProcess(remote_url=url, remote_shards_file=document.path) as sidecar:
        with session_of(sidecar) as session:
            store(session, *CHUNKS)
            sidecar.wait_until(lambda stats: stats["remote"]["written"] == len(CHUNKS))
        num_rows_before = list(map(num_rows, servers))
        assert sum(num_rows_before) == len(CHUNKS)
        assert num_rows_before[2] == 0

        document.write(servers, servers[:2])
        sidecar.wait_until(lambda stats: str(servers[2].port) in stats["remote"]["address"])
        restart_without_memory(sidecar)
        load_all(sidecar)
        wait_until(lambda: num_rows(servers[2]) > 0)
        sidecar.settled()
        num_moved = num_rows(servers[2])
        assert sidecar.stats()["remote"]["stored"] == num_moved < len(CHUNKS) * 0.7

        document.write_text("current: [cache-0.cache;6379")
        sidecar.wait_until(lambda stats: "is not YAML" in stats["remote"]["shards_problem"])
        assert str(servers[2].port) in sidecar.stats()["remote"]["address"]

        document.write(servers[1:], servers)
        sidecar.wait_until(lambda stats: not stats["remote"]["shards_problem"])
        restart_without_memory(sidecar)
        load_all(sidecar)
        sidecar.settled()
        servers[0].kill()
        restart_without_memory(sidecar)
        load_all(sidecar)


@pytest.mark.skipif("valkey" in BINARY, reason="this valkey-server may be built without TLS")
def test_shards_switch_to_tls_in_turn(servers, document, tmp_path):
    certificates = make_certificates(tmp_path)
    document.write(servers[:2])
    options = {"remote_url": "redis://127.0.0.1:1", "remote_shards_file": document.path}
    with SidecarProcess(**options) as sidecar, session_of(sidecar) as session:
        chunks = itertools.count(100)

        def is_written(server: RedisProcess) -> bool:
            """Whether the sidecar writes to this server again."""
            store(session, *itertools.islice(chunks, 8))
            sidecar.settled()
            return num_rows(server) > 0

        for server in servers[:2]:
            server.kill()
            server.tls = certificates
            server.start()
            document.write(servers[:2])
            wait_until(partial(is_written, server))
        assert sidecar.stats()["remote"]["shards_problem"] == ""
