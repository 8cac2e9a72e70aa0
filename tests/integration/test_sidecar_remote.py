"""A real sidecar on a Redis that is absent, or that loses or refuses rows: it stores them later."""

import pytest

from testing.child_process import wait_until
from testing.processes import RedisProcess, SidecarProcess
from tests.harness.engine import CHUNK_BYTES, load, report, restart_without_memory, session_of, store
from tests.harness.sidecar.wire import attached, make_keys, usable

pytestmark = pytest.mark.redis

ROWS = range(8)


@pytest.fixture
def server():
    with RedisProcess() as server:
        yield server


@pytest.fixture
def sidecar(server):
    with SidecarProcess(remote_url=server.unix_url, remote_timeout_seconds=0.5) as sidecar:
        yield sidecar


def num_stored(server) -> int:
    with server.client as redis:
        return redis.dbsize()


def test_sidecar_serves_without_redis_and_uses_it_later(server):
    server.kill()
    with SidecarProcess(remote_url=server.unix_url) as sidecar:
        assert sidecar.get("/readyz") == "ready\n"
        sidecar.wait_until(lambda stats: not stats["remote"]["is_reachable"])
        assert f"remote tier {server.unix_url.removeprefix('unix://')}: " in sidecar.log
        with session_of(sidecar) as session:
            remote = sidecar.stats()["remote"]
            assert (remote["is_reachable"], bool(remote["off_reason"])) == (False, True)
            store(session, 1)
            assert session.lookup("r", [(0, make_keys(1))]).num_leased == 1
            server.start()
            store(session, 2)
            sidecar.wait_until(lambda stats: stats["remote"]["written"] == 2)


def test_private_rows_are_not_written_through_and_others_of_their_namespace_are(server, sidecar):
    with session_of(sidecar, engine_uuid=b"p" * 16, private_reason="random hash seed") as private:
        store(private, 1, 2)
        assert sidecar.stats()["clients"][0]["private_reason"] == "random hash seed"
        sidecar.settled()
        assert num_stored(server) == 0
        with session_of(sidecar) as session:
            store(session, 3)
            wait_until(lambda: num_stored(server) == 1)


def test_sidecars_share_marks_of_documents_and_none_of_private_namespaces(server, sidecar):
    mark, private_mark, since = b"mark___1", b"mark___2", 0
    with (
        session_of(sidecar, engine_uuid=b"p" * 16, private_reason="random hash seed") as private,
        session_of(sidecar) as first,
        SidecarProcess(remote_url=server.unix_url) as other_sidecar,
        session_of(other_sidecar) as second,
    ):
        assert private.share_marks(private_mark, 0).marks == private_mark
        assert first.share_marks(mark, 0).marks == mark
        wait_until(lambda: num_stored(server) == 1)
        wait_until(lambda: second.share_marks(b"", since).marks == mark)
        assert private.share_marks(b"", 0).marks == private_mark
        assert first.share_marks(b"", 0).marks == mark
        (name,) = server.client.keys()
        assert server.client.zrange(name, 0, -1) == [mark]
        assert [each.stats()["num_document_marks"] for each in (sidecar, other_sidecar)] == [2, 1]


def test_rows_that_redis_finds_after_the_engine_went_on_are_too_late(server):
    """The sidecar's memory and history are new, so it knows these rows only from the answer of Redis."""
    with SidecarProcess(remote_url=server.unix_url, remote_timeout_seconds=30) as sidecar:
        with session_of(sidecar) as session:
            store(session, *ROWS)
            sidecar.wait_until(lambda stats: stats["remote"]["written"] == len(ROWS))
        restart_without_memory(sidecar)
        with session_of(sidecar) as session:
            server.freeze()
            assert session.lookup("late", [(0, make_keys(*ROWS))]).is_probing
            report(session, "late", *ROWS, first_blocks=bytes(range(15 * 8)), block_tokens=16)
            assert sidecar.stats()["causes"]["prompt_tokens"] == 0, "the answer decides"
            server.thaw()
            causes = sidecar.wait_until(lambda stats: stats["causes"]["prompt_tokens"] and stats["causes"])
            assert causes["cause_tokens"] == {"too_late": 256 * len(ROWS), "tail": 5}


def test_restarted_redis_gets_hit_rows_again(server, sidecar, attach):
    session = attach()
    store(session, *ROWS)
    sidecar.wait_until(lambda stats: stats["remote"]["written"] == len(ROWS))
    server.restart()
    assert num_stored(server) == 0
    store(session, 100)  # the next request to Redis detects the restart
    wait_until(lambda: num_stored(server) == 1)
    server.client.flushall()

    def hit() -> bool:
        load(session, session, "hit", *ROWS)
        return num_stored(server) == len(ROWS)

    wait_until(hit)


def test_rows_that_are_hit_in_an_outage_are_stored_after_it(server, sidecar, connect):
    """The outage lasts from before a restart of the sidecar, and only hits follow it."""
    session = attached(client := connect())
    usable(sidecar)
    store(session, *ROWS)
    sidecar.wait_until(lambda stats: stats["remote"]["written"] == len(ROWS))
    server.kill()
    sidecar.restart()
    session = attached(client, newer_than=session)
    usable(sidecar)

    def hit() -> bool:
        return len(load(session, session, "hit", *ROWS)) == len(ROWS)

    wait_until(hit)
    assert not sidecar.settled()["remote"]["is_reachable"]
    server.start()
    sidecar.wait_until(lambda stats: stats["remote"]["is_reachable"])
    wait_until(lambda: hit() and num_stored(server) == len(ROWS))


@pytest.mark.parametrize("refusing", ["full", "read-only"])
def test_refused_rows_are_stored_when_redis_accepts_them(server, sidecar, attach, refusing):
    if refusing == "full":
        server.client.config_set("maxmemory", 1)
    else:
        server.client.replicaof("127.0.0.1", "1")
    session = attach()
    store(session, *ROWS)
    sidecar.wait_until(lambda stats: stats["remote"]["writes_skipped"].get("refused", 0) >= len(ROWS))
    assert num_stored(server) == 0
    server.client.config_set("maxmemory", 0)
    server.client.replicaof("NO", "ONE")
    wait_until(lambda: num_stored(server) == len(ROWS))  # without any lookup of these rows


@pytest.mark.parametrize("chunk_bytes", [2 * CHUNK_BYTES, 1 << 38])
def test_geometry_change_loses_no_queued_row(server, sidecar, connect, chunk_bytes):
    """The engine that left has stored its rows, whether the new geometry is possible or not."""
    server.freeze()
    session = attached(client := connect())
    usable(sidecar)
    store(session, *ROWS)
    load(session, session, "hit", *ROWS)
    memory = sidecar.stats()["memory"]
    assert memory["hits"] == len(ROWS) == memory["tenant_rows"]["none"]
    sidecar.wait_until(lambda stats: stats["num_unwritten_rows"] == len(ROWS))
    client.close()
    sidecar.wait_until(lambda stats: not stats["clients"])
    server.thaw()
    second = connect(engine_uuid=b"f" * 16, chunk_bytes=chunk_bytes)
    wait_until(lambda: num_stored(server) == len(ROWS))
    if chunk_bytes == 2 * CHUNK_BYTES:
        attached(second)
        stats = sidecar.stats()
        assert stats["remote"]["written"] == len(ROWS)
        assert (stats["memory"]["hits"], stats["memory"]["tenant_rows"]["other"]) == (len(ROWS), 0)
        assert "none" not in stats["memory"]["tenant_rows"]
