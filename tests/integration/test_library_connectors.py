"""The library's connectors on real servers: one server, Sentinel, Cluster, TLS, and failing servers."""

import contextlib
import random

import pytest

from lmcache.config import GlobalConfig
from lmcache.storage_backend.connector import CreateConnector
from testing.certificates import make_certificates
from testing.processes import RedisProcess
from tests.harness.loops import retried
from tests.harness.tiers.redis_topologies import SERVICE, cluster, sentinel_set

pytestmark = pytest.mark.redis

KEYS = [f"vllm@org/model@v1@1@0@{number:064x}" for number in range(40)]


def check_everything(connector):
    """Check set, get, exists and list with values of chunk size."""
    payload = random.Random(1).randbytes(5 << 20)
    assert connector.get(KEYS[0]) is None
    for key in KEYS:
        connector.set(key, key.encode())
    connector.set(KEYS[3], payload)
    assert connector.exists(KEYS[3])
    assert not connector.exists("absent")
    assert connector.get(KEYS[3]) == payload
    assert connector.get(KEYS[4]) == KEYS[4].encode()
    assert set(KEYS) <= set(connector.list())
    keys = ["absent", *KEYS[3:9], "absent too"]
    assert connector.exists_many(keys) == [False, *[True] * 6, False]
    assert connector.get_many(keys) == [None, payload, *(key.encode() for key in KEYS[4:9]), None]
    assert connector.get_many([]) == []


def check_server(url):
    with contextlib.closing(CreateConnector(url)) as connector:
        check_everything(connector)


@pytest.mark.parametrize("debug", [False, True])
def test_exists_many_takes_one_round_trip(debug, monkeypatch):
    monkeypatch.setattr(GlobalConfig, "enable_debug", debug)
    with RedisProcess() as server, server.client as client:
        connector = CreateConnector(f"redis://127.0.0.1:{server.port}")
        connector.set(KEYS[0], b"x")
        before = client.info("stats")["total_reads_processed"]
        assert connector.exists_many(KEYS) == [True, *[False] * (len(KEYS) - 1)]
        # The server counts reads: one for all keys, and one for INFO itself.
        assert client.info("stats")["total_reads_processed"] - before <= 2
        connector.close()


def test_defect_19_url_selects_password_and_database():
    with RedisProcess(password="p@ss/word:1") as server:
        with server.client as client:
            client.set("foreign", "x")
            client.select(3)
            client.set("session@of@some@other@app", "x")
            client.set(b"\xff@a@b@c@d", "x")
        check_server(f"redis://:p%40ss%2Fword%3A1@127.0.0.1:{server.port}/3")


def test_documented_acl_rules_suffice():
    rules = ["lmc", "on", ">pw", "~*", "+get", "+set", "+exists", "+scan"]
    with RedisProcess() as server:
        with server.client as client:
            client.execute_command("ACL", "SETUSER", *rules)
        check_server(f"redis://lmc:pw@127.0.0.1:{server.port}")
        refused = CreateConnector(f"redis://lmc:wrong@127.0.0.1:{server.port}")
        with pytest.raises(ConnectionError) as caught:
            refused.get(KEYS[0])
        assert "wrong" not in str(caught.value)


def test_tls_trusts_the_configured_authority(tmp_path, monkeypatch):
    certificates = make_certificates(tmp_path)
    with RedisProcess(tls=certificates) as server:
        untrusting = CreateConnector(f"rediss://127.0.0.1:{server.port}")
        with pytest.raises(ConnectionError, match="certificate"):
            untrusting.get(KEYS[0])
        monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))
        check_server(f"rediss://127.0.0.1:{server.port}")


def test_cluster_lists_keys_of_all_nodes():
    with cluster() as servers:
        check_server(servers.url)


def test_defect_28_sentinel_reads_return_the_latest_write(monkeypatch):
    monkeypatch.setenv("REDIS_SERVICE_NAME", SERVICE)
    with sentinel_set() as (sentinel, master, replica):
        connector = CreateConnector(f"redis-sentinel://127.0.0.1:{sentinel.port}")
        replica.freeze()  # replication stops, and the replica answers no request
        check_everything(connector)
        replica.thaw()
        master.kill()
        retried(lambda: connector.exists(KEYS[0]))
        connector.set(KEYS[0], b"at the new master")
        with replica.client as client:
            assert client.get(KEYS[0]) == b"at the new master"
        connector.close()


def test_full_server_raises_instead_of_losing_values():
    with RedisProcess(maxmemory="8mb", maxmemory_policy="noeviction") as server:
        connector = CreateConnector(f"redis://127.0.0.1:{server.port}")
        for key in KEYS[:4]:
            connector.set(key, bytes(1 << 20))
        with pytest.raises(ValueError, match="maxmemory"):
            list(map(connector.set, KEYS, [bytes(1 << 20)] * len(KEYS)))
        connector.close()
