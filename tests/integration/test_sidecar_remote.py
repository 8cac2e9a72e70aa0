"""A real sidecar with a Redis that is killed, frozen or absent."""

import re

import pytest

from testing.child_process import wait_until
from testing.processes import RedisProcess, SidecarProcess
from tests.harness.engine import check_promoted, restart_without_memory, session_of, store
from tests.harness.wire import RawClient, make_hello, make_keys


@pytest.mark.redis
def test_sigterm_writes_queued_rows_through():
    with (
        RedisProcess() as redis_server,
        SidecarProcess(remote_url=redis_server.unix_url, remote_timeout_seconds=1) as sidecar,
    ):
        with session_of(sidecar) as session:
            redis_server.freeze()
            store(session, *range(20))
            sidecar.wait_until(lambda stats: not stats["remote"]["is_reachable"])
            redis_server.thaw()
            assert sidecar.terminate() == 0
            with redis_server.client as redis:
                assert redis.dbsize() == 20

        restart_without_memory(sidecar)
        with session_of(sidecar) as session:
            check_promoted(session, *range(20))


@pytest.mark.redis
def test_rows_not_written_within_the_grace_period_are_logged():
    with (
        RedisProcess() as redis_server,
        SidecarProcess(remote_url=redis_server.unix_url, drain_grace_seconds=0.3) as sidecar,
        session_of(sidecar) as session,
    ):
        redis_server.kill()
        store(session, *range(5))
        assert sidecar.terminate() == 0
        assert re.search("[45] rows were not written through within the grace period", sidecar.log)


@pytest.mark.redis
def test_private_rows_are_not_written_through():
    with RedisProcess() as redis_server, SidecarProcess(remote_url=redis_server.unix_url) as sidecar:
        with session_of(sidecar, private_reason="random hash seed") as session:
            store(session, 1, 2)
            assert sidecar.stats()["clients"][0]["private_reason"] == "random hash seed"
        assert sidecar.terminate() == 0
        with redis_server.client as redis:
            assert redis.dbsize() == 0


def test_sidecar_serves_with_an_unreachable_remote_tier():
    with SidecarProcess(remote_url="redis://127.0.0.1:1") as sidecar:
        assert sidecar.get("/readyz") == "ready\n"
        sidecar.wait_until(lambda stats: not stats["remote"]["is_reachable"])
        assert "remote tier 127.0.0.1:1: " in sidecar.log
        with session_of(sidecar) as session:
            store(session, 1)
            sidecar.wait_until(lambda stats: not stats["remote"]["is_reachable"])
            assert session.lookup("r", [(0, make_keys(1))]).num_leased == 1


@pytest.mark.redis
def test_remote_tier_that_was_down_at_the_start_is_used_later():
    with RedisProcess() as server:
        server.kill()
        with SidecarProcess(remote_url=server.unix_url) as sidecar:
            sidecar.wait_until(lambda stats: not stats["remote"]["is_reachable"])
            server.start()
            with session_of(sidecar) as session:
                store(session, 1)
                sidecar.wait_until(lambda stats: stats["remote"]["written"] == 1)


@pytest.mark.redis
def test_private_engine_does_not_make_the_namespace_of_others_private():
    private_hello = make_hello(engine_uuid=b"p" * 16, private_reason="seeded")
    with (
        RedisProcess() as redis_server,
        SidecarProcess(remote_url=redis_server.unix_url) as sidecar,
        session_of(sidecar) as session,
        RawClient(sidecar, private_hello) as private_client,
        redis_server.client as redis,
    ):
        private_client.attach()
        store(session, 1)
        wait_until(lambda: redis.dbsize() == 1)
