"""A master that Sentinels name: only it is read and written, and a new master is found automatically."""

import contextlib

import pytest

from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.errors import TierUnavailableError
from lmcache_store.tiers.probing import num_leading
from testing.child_process import free_port, wait_until
from testing.processes import RedisProcess
from tests.harness.tiers.redis_topologies import SERVICE, sentinel_set
from tests.harness.tiers.remote_objects import KEY, is_available, load, tier_of

pytestmark = pytest.mark.redis


@pytest.fixture
def password():
    return ""


@pytest.fixture
def servers(password):
    with sentinel_set(password) as servers:
        yield servers


@pytest.fixture
def remote(servers, password):
    userinfo = f":{password}@" if password else ""
    unreachable = f"127.0.0.1:{free_port()}"
    tier = tier_of(f"redis-sentinel://{userinfo}{unreachable},127.0.0.1:{servers[0].port}/{SERVICE}/2")
    yield tier
    tier.close()


def num_objects(server: RedisProcess) -> int:
    return server.client.info("keyspace").get("db2", {"keys": 0})["keys"]


@pytest.mark.parametrize("password", ["", "s3cret"])
def test_reads_and_writes_go_to_the_master(remote, servers):
    _, master, replica = servers
    assert remote.store(ObjectId(KEY, 0), memoryview(b"x"))
    assert load(remote) == b"x"
    assert num_leading(remote, [KEY], 1) == 1
    remote.touch([KEY], 1)
    assert num_objects(master) == 1
    calls = replica.client.info("commandstats")
    assert not {"cmdstat_get", "cmdstat_exists", "cmdstat_touch"} & calls.keys()


def test_new_master_is_found_after_the_old_one_died(remote, servers):
    _, master, replica = servers
    assert remote.store(ObjectId(KEY, 0), memoryview(b"x"))
    wait_until(lambda: num_objects(replica) == 1)
    master.kill()
    with pytest.raises(TierUnavailableError):
        load(remote)

    wait_until(lambda: is_available(remote))
    assert load(remote) == b"x"
    assert remote.store(ObjectId(KEY[::-1], 0), memoryview(b"y"))
    assert num_objects(replica) == 2


def test_demoted_master_is_left_for_the_new_one(remote, servers):
    """After a failover that did not kill it, an old master may still answer, and is read-only."""
    sentinel, master, replica = servers
    assert remote.store(ObjectId(KEY, 0), memoryview(b"x"))
    wait_until(lambda: num_objects(replica) == 1)
    sentinel.client.execute_command("SENTINEL", "FAILOVER", SERVICE)
    wait_until(lambda: replica.client.role()[0] == b"master")
    master.client.replicaof("127.0.0.1", replica.port)  # the Sentinel does this within ten seconds

    def is_stored() -> bool:
        with contextlib.suppress(TierUnavailableError):
            return remote.store(ObjectId(KEY[::-1], 0), memoryview(b"y"))
        return False

    wait_until(is_stored)
    assert num_objects(replica) == 2


@pytest.mark.parametrize(
    ("is_running", "service", "problem"),
    [
        (True, "nonsense", "knows no service 'nonsense'"),
        (False, SERVICE, r"no Sentinel names a master: .*refused"),
    ],
)
def test_missing_master_is_an_error(servers, is_running, service, problem):
    port = servers[0].port if is_running else free_port()
    remote = tier_of(f"redis-sentinel://127.0.0.1:{port}/{service}")
    with contextlib.closing(remote), pytest.raises(TierUnavailableError, match=problem):
        load(remote)
