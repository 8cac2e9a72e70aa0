"""A real sidecar that follows changes of the shard list."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from testing.child_process import wait_until
from testing.processes import RedisProcess, SidecarProcess
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
        self.write_text(f"current: {lists[0]}\nprevious: {lists[1]}\nuntil: {until}\n")

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
