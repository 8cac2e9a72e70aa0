"""A real sidecar with a Redis that is killed, frozen or absent."""

import pytest

from testing.child_process import wait_until
from testing.processes import RedisProcess, SidecarProcess
from tests.harness.engine import session_of, store
from tests.harness.sidecar.wire import make_keys

pytestmark = pytest.mark.redis


def test_sidecar_serves_without_its_remote_tier_and_uses_it_later():
    with RedisProcess() as server:
        server.kill()
        with SidecarProcess(remote_url=server.unix_url) as sidecar:
            assert sidecar.get("/readyz") == "ready\n"
            sidecar.wait_until(lambda stats: not stats["remote"]["is_reachable"])
            assert f"remote tier {server.unix_url.removeprefix('unix://')}: " in sidecar.log
            with session_of(sidecar) as session:
                store(session, 1)
                assert session.lookup("r", [(0, make_keys(1))]).num_leased == 1
                server.start()
                store(session, 2)
                sidecar.wait_until(lambda stats: stats["remote"]["written"] == 2)


def test_private_rows_are_not_written_through_and_others_of_their_namespace_are():
    with (
        RedisProcess() as redis_server,
        SidecarProcess(remote_url=redis_server.unix_url) as sidecar,
        redis_server.client as redis,
        session_of(sidecar, engine_uuid=b"p" * 16, private_reason="random hash seed") as private,
    ):
        store(private, 1, 2)
        assert sidecar.stats()["clients"][0]["private_reason"] == "random hash seed"
        sidecar.settled()
        assert redis.dbsize() == 0
        with session_of(sidecar) as session:
            store(session, 3)
            wait_until(lambda: redis.dbsize() == 1)
