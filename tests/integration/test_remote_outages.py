"""The remote tier with a server that is down, frozen, full, protected, or not Redis at all."""

import contextlib
import socket
import threading

import pytest

from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.errors import TierUnavailableError
from lmcache_store.tiers.header import PART_BYTES
from lmcache_store.tiers.probing import num_leading
from testing.certificates import make_certificates
from testing.child_process import free_port, wait_until
from testing.processes import BINARY, RedisProcess
from tests.harness.tiers.remote_objects import KEY, answering, is_available, load, pattern, tier_of

pytestmark = pytest.mark.redis

HAS_NO_TLS = pytest.mark.skipif("valkey" in BINARY, reason="this valkey-server may be built without TLS")


@pytest.fixture
def medium():
    return "unix"


@pytest.fixture
def certificates(medium, tmp_path):
    return make_certificates(tmp_path) if medium == "tls" else None


@pytest.fixture
def server(certificates):
    with RedisProcess(tls=certificates) as server:
        yield server


@pytest.fixture
def remote(request, medium, server, certificates):
    url = server.unix_url if medium == "unix" else server.url
    tier = tier_of(f"{url}?ca={certificates.ca}" if certificates else url, getattr(request, "param", 60.0))
    yield tier
    tier.close()


class TestOutages:
    @pytest.mark.parametrize("medium", ["unix", "tcp", pytest.param("tls", marks=HAS_NO_TLS)])
    @pytest.mark.parametrize("remote", [3.0], indirect=True)
    def test_server_is_used_again_after_a_freeze_and_restarts(self, remote, server):
        assert remote.store(ObjectId(KEY, 0), memoryview(b"x"))
        server.freeze()
        with pytest.raises(TierUnavailableError, match=r"within 3\.0 s"):
            remote.store(ObjectId(KEY[::-1], 0), memoryview(pattern(3 * PART_BYTES)))
        assert not is_available(remote)
        server.thaw()
        wait_until(lambda: is_available(remote))
        assert load(remote) == b"x"
        assert load(remote, key=KEY[::-1]) is None, "the half-sent value was dropped with its connection"
        num_failures = remote.stats.failures
        server.restart()  # between two requests: not noticed
        assert load(remote) is None
        assert remote.store(ObjectId(KEY, 0), memoryview(b"x"))
        assert remote.stats.failures == num_failures
        server.kill()
        with pytest.raises(TierUnavailableError):
            load(remote)
        assert not is_available(remote)
        server.start()
        wait_until(lambda: is_available(remote))
        assert load(remote) is None

    def test_full_server_refuses_stores(self, server):
        server.client.config_set("maxmemory", 24 << 20)
        remote = tier_of(server.unix_url)
        results = [
            remote.store(ObjectId(bytes([number]) * 64, 0), memoryview(pattern(PART_BYTES)))
            for number in range(8)
        ]
        assert results[0]
        assert not results[-1]
        assert remote.stats.refused["OOM"] == results.count(False)
        assert [num_leading(remote, [bytes([number]) * 64], 1) == 1 for number in range(8)] == results
        assert not remote.health.is_open
        assert load(remote, key=bytes([0]) * 64) is not None
        remote.close()

    def test_user_restricted_to_the_prefix_suffices(self, server):
        server.client.acl_setuser(
            "kv", enabled=True, passwords=["+s3cret"], keys=["lmc1:*"], categories=["+@all"]
        )
        url = server.url.replace("redis://", "redis://kv:s3cret@")
        remote, foreign = tier_of(url), tier_of(f"{url}?prefix=other")
        assert remote.store(ObjectId(KEY, 0), memoryview(b"x"))
        assert load(remote) == b"x"
        assert num_leading(remote, [KEY], 1) == 1
        remote.touch([KEY], 1)
        # The server refuses the commands. The client must not take that for an outage.
        assert not foreign.store(ObjectId(KEY, 0), memoryview(b"x"))
        assert load(foreign) is None
        assert num_leading(foreign, [KEY], 1) == 0
        foreign.touch([KEY], 1)
        assert foreign.stats.refused == foreign.stats.invalid == {"NOPERM": 1}
        assert not foreign.health.is_open
        remote.close()
        foreign.close()

    @pytest.mark.parametrize("size", [1, 3 * PART_BYTES])
    @pytest.mark.parametrize("command", ["HEXISTS", "HSET"])
    def test_refused_store_keeps_the_connection_usable(self, remote, server, size, command):
        server.client.execute_command("ACL", "SETUSER", "default", f"-{command}")
        assert not remote.store(ObjectId(KEY, 0), memoryview(pattern(size)))
        assert remote.stats.refused == {"NOPERM": 1}
        server.client.execute_command("ACL", "SETUSER", "default", f"+{command}")
        assert load(remote) is None
        assert remote.store(ObjectId(KEY, 0), memoryview(pattern(size)))
        assert load(remote) == pattern(size)

    def test_cluster_node_with_the_wrong_scheme_is_unavailable(self):
        """The server belongs to a Cluster. Without redis-cluster:// the tier is unhealthy."""
        with RedisProcess(cluster_enabled="yes", cluster_port=free_port()) as server:
            remote = tier_of(server.url)
            with pytest.raises(TierUnavailableError, match="CLUSTERDOWN"):
                load(remote)
            assert remote.health.is_open
            remote.close()

    def test_unknown_command_is_not_an_outage(self, server, tmp_path):
        (tmp_path / "conf").write_text('rename-command HEXISTS ""\n')
        with RedisProcess(include=tmp_path / "conf") as limited:
            remote = tier_of(limited.url)
            assert not remote.store(ObjectId(KEY, 0), memoryview(b"x"))
            assert load(remote) is None
            assert remote.stats.refused == {"ERR": 1}
            assert not remote.health.is_open
            remote.close()


class TestBrokenServer:
    """A server with invalid answers: each answer has a defined result."""

    @pytest.mark.parametrize(
        ("reply", "is_silent_after", "message"),
        [
            (b"", False, "closed the connection"),
            (b"", True, "no complete message within"),
            (b"*2\r\n$704\r\nshort", False, "closed the connection"),
            (b"*2\r\n$704\r\nshort", True, "within"),
            (b"-LOADING Redis is loading\r\n", True, "LOADING"),
            (b"-NOAUTH Authentication required.\r\n", True, "NOAUTH"),
            (b"+OK\r\n", True, "unexpected reply"),
            (b"$12x\r\n", True, "unexpected reply"),
            (b"*3\r\n", True, "unexpected reply"),
            (b"*-1\r\n", True, "unexpected reply"),
            (b"*2\r\n:1\r\n", True, "unexpected reply"),
            (b"HTTP/1.1 400 Bad Request\r\n\r\n", True, "unexpected reply"),
            (b"x" * 10_000, True, "does not speak RESP"),
        ],
    )
    def test_invalid_answers_raise_within_the_deadline(self, reply, is_silent_after, message):
        with answering(reply, is_silent_after=is_silent_after) as address:
            remote = tier_of(f"redis://{address}", 1.0 if "within" in message else 60.0)
            with pytest.raises(TierUnavailableError, match=message):
                load(remote)
            assert remote.health.is_open
            remote.close()

    def test_nil_is_a_miss(self):
        with answering(b"*2\r\n$-1\r\n$-1\r\n") as address:
            remote = tier_of(f"redis://{address}")
            assert load(remote) is None
            remote.close()

    @pytest.mark.parametrize("url", ["redis://:s3cret@", "redis://"])
    def test_trickling_server_raises_at_the_deadline(self, url):
        """Each byte arrives within the deadline, but the whole answer (to AUTH, or to SELECT) would not."""
        over = threading.Event()
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def trickle() -> None:
                with contextlib.suppress(OSError):
                    peer, _ = listener.accept()
                    with peer:
                        while not over.wait(0.05):
                            peer.send(b"+")

            threading.Thread(target=trickle, daemon=True).start()
            remote = tier_of(f"{url}127.0.0.1:{listener.getsockname()[1]}/3", 0.2)
            try:
                with pytest.raises(TierUnavailableError, match=r"within 0\.2 s"):
                    load(remote)
                assert not over.is_set()
            finally:
                over.set()
                remote.close()
