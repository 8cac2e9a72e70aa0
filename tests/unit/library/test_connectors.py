"""Connectors: URLs, created clients, and the documented subset of redis-py that a client needs."""

import contextlib
import socket

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from lmcache.config import GlobalConfig
from lmcache.storage_backend.connector import (
    ConnectorType,
    CreateConnector,
    ParsedRemoteURL,
    RemoteBytesConnector,
    RemoteConnector,
    RemoteConnectorDebugWrapper,
    RemoteTensorConnector,
    check_connector_type,
    parse_remote_url,
)
from lmcache.storage_backend.connector.lm_connector import LMCServerConnector
from lmcache.storage_backend.connector.redis_connector import (
    RedisClusterConnector,
    RedisConnector,
    RedisSentinelConnector,
)
from tests.harness.library.small_redis import SmallRedis

KEY = "vllm@org/model@1@0@ab12"


@pytest.fixture(autouse=True)
def _without_wrapper():
    GlobalConfig.set_debug(False)
    yield
    GlobalConfig.set_debug(True)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(redis, "Redis", SmallRedis)
    return CreateConnector("redis://cache:6380")


# ---- URLs ----


@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        ("redis://localhost:6379", ParsedRemoteURL("redis", ["localhost"], [6379])),
        ("lm://10.0.0.1:65432", ParsedRemoteURL("lm", ["10.0.0.1"], [65432])),
        ("redis-sentinel://a:1,b:2,c:3", ParsedRemoteURL("redis-sentinel", ["a", "b", "c"], [1, 2, 3])),
        ("redis://[::1]:6379/3", ParsedRemoteURL("redis", ["::1"], [6379], database=3)),
        ("redis://:p%40ss@h:1/0", ParsedRemoteURL("redis", ["h"], [1], password="p@ss")),
        ("rediss://user:a@b@h:1", ParsedRemoteURL("rediss", ["h"], [1], username="user", password="a@b")),
    ],
)
def test_defect_19_parses_all_parts_of_a_url(url, parsed):
    assert parse_remote_url(url) == parsed


BAD_URLS = """
redis redis:// redis://h redis://:6379 redis://h:x redis://h:0 redis://h:65536 ://h:1 redis://h:1/x
redis://h:1/² redis://h:1, redis://::1:6379 redis://h:1?a=b
"""


@pytest.mark.parametrize("url", ["", *BAD_URLS.split()])
def test_refuses_invalid_urls(url):
    with pytest.raises(ValueError, match=r"url|URL"):
        parse_remote_url(url)


@given(st.text() | st.builds("{}://{}:{}@{}:{}/{}".format, *[st.text(max_size=5)] * 6))
def test_any_url_parses_or_raises_value_error(url):
    with contextlib.suppress(ValueError):
        parsed = parse_remote_url(url)
        assert len(parsed.hosts) == len(parsed.ports) > 0
        assert all(0 < port < 65536 for port in parsed.ports)


@pytest.mark.parametrize("url", ["redis://u:secret@h", "lm://u:secret@h:1", "redis-cluster://u:secret@h:1/2"])
def test_errors_never_show_the_password(url):
    with pytest.raises(ValueError, match=r"url|URL") as error:
        CreateConnector(url)
    assert "secret" not in str(error.value)
    assert "secret" not in repr(parse_remote_url("redis://u:secret@h:1"))


# ---- creation ----


def test_defect_19_database_user_and_password_reach_the_client():
    connector = CreateConnector("rediss://user:pw@cache:6380/3")
    assert isinstance(connector, RedisConnector)
    pool = connector.connection.connection_pool
    assert pool.connection_class is redis.SSLConnection
    options = pool.connection_kwargs
    assert (options["host"], options["port"], options["db"]) == ("cache", 6380, 3)
    assert (options["username"], options["password"]) == ("user", "pw")
    assert 0 < options["socket_timeout"] <= 5
    assert 0 < options["socket_connect_timeout"] <= 5
    assert options["retry"].get_retries() == 1


def test_does_not_retry_after_a_timeout():
    """A retry on a frozen server would double the wait without a better chance of a reply."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        connector = RedisConnector("127.0.0.1", silent.getsockname()[1], socket_timeout=0.05)
        with pytest.raises(ConnectionError, match=r"[Tt]ime"):
            connector.get(KEY)
        silent.settimeout(0)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()
        connector.close()


@pytest.mark.parametrize(
    ("environment", "service", "timeout"),
    [({}, "mymaster", 1), ({"REDIS_SERVICE_NAME": "kv", "REDIS_TIMEOUT": "0.5"}, "kv", 0.5)],
    ids=["defaults", "environment"],
)
def test_defect_28_sentinel_reads_and_writes_at_the_master(monkeypatch, environment, service, timeout):
    for name in ("REDIS_SERVICE_NAME", "REDIS_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    connector = CreateConnector("redis-sentinel://:pw@a:1,b:2/3")
    assert isinstance(connector, RedisSentinelConnector)
    pool = connector.connection.connection_pool
    assert (pool.service_name, pool.is_master) == (service, True)
    options = pool.connection_kwargs
    assert (options["socket_timeout"], options["db"], options["password"]) == (timeout, 3, "pw")
    sentinels = [sentinel.connection_pool.connection_kwargs for sentinel in pool.sentinel_manager.sentinels]
    assert [(each["host"], each["port"], each["socket_timeout"]) for each in sentinels] == [
        ("a", 1, timeout),
        ("b", 2, timeout),
    ]


def test_invalid_timeout_of_sentinels_is_refused(monkeypatch):
    monkeypatch.setenv("REDIS_TIMEOUT", "invalid")
    with pytest.raises(ValueError, match="invalid"):
        CreateConnector("redis-sentinel://a:26379")


def test_missing_cluster_raises_at_the_first_call():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    connector = CreateConnector(f"redis-cluster://127.0.0.1:{port}")
    assert isinstance(connector, RedisClusterConnector)
    with pytest.raises(ConnectionError, match="Redis"):
        connector.exists(KEY)
    connector.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://h:1", "Unknown connector type 'http'"),
        ("infinistore://h:1", "Unknown connector type"),
        ("redis://a:1,b:2", "takes one host"),
        ("lm://a:1,b:2", "takes one host"),
        ("lm://h:1/2", "neither user"),
        ("redis-cluster://h:1/2", "only database 0"),
    ],
)
def test_refuses_unsupported_urls(url, message):
    with pytest.raises(ValueError, match=message):
        CreateConnector(url)


def test_debugging_wraps_connectors_in_timers():
    GlobalConfig.set_debug(True)
    connector = CreateConnector("lm://h:1", device="cpu")
    assert isinstance(connector, RemoteConnectorDebugWrapper)
    assert isinstance(connector.connector, LMCServerConnector)
    assert check_connector_type(connector) is ConnectorType.BYTES


def test_check_connector_type_returns_the_type():
    def stub(base):
        names = ("exists", "get", "set", "list", "close")
        return type("Stub", (base,), {name: lambda *_: None for name in names})()

    assert check_connector_type(stub(RemoteBytesConnector)) is ConnectorType.BYTES
    assert check_connector_type(stub(RemoteTensorConnector)) is ConnectorType.TENSOR
    with pytest.raises(ValueError, match="Unknown connector type: Stub"):
        check_connector_type(stub(RemoteConnector))


# ---- Redis ----


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_client_needs_only_the_documented_methods(small, is_wrapped):
    assert SmallRedis.arguments == {"host": "cache", "port": 6380}
    client = small.connection
    small = RemoteConnectorDebugWrapper(small) if is_wrapped else small
    assert not small.exists(KEY)
    assert small.get(KEY) is None
    small.set(KEY, b"value")
    assert small.exists(KEY)
    assert small.get(KEY) == b"value"
    assert small.list() == [KEY]
    small.close()
    assert client.closed


def test_list_returns_each_name_once(small):
    names = ["vllm@model@1@0@1", "session:1", "a@b@c@d@e", "@@@@", "ключ", ""]
    for name in [*names[:4], b"\xff\xfe@a@1@0@b", *(name.encode() for name in names)]:
        small.connection.values[name] = b"x"
    assert sorted(small.list()) == sorted([*names, "\udcff\udcfe@a@1@0@b"])


@pytest.mark.parametrize(
    "error",
    [redis.ConnectionError("closed"), redis.TimeoutError("slow"), redis.RedisError("odd"), OSError("net")],
)
@pytest.mark.parametrize("name", ["exists", "get", "set", "list"])
def test_defect_12_client_errors_become_connection_errors(small, monkeypatch, name, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(small.connection, "scan" if name == "list" else name, fail)
    arguments = {"exists": (KEY,), "get": (KEY,), "set": (KEY, b"x"), "list": ()}[name]
    with pytest.raises(ConnectionError, match=str(error)):
        getattr(small, name)(*arguments)


def test_refusal_of_the_server_raises_value_error(small, monkeypatch):
    def refuse(*_):
        raise redis.ResponseError("OOM")

    monkeypatch.setattr(small.connection, "set", refuse)
    with pytest.raises(ValueError, match="Redis refuses the request: OOM"):
        small.set(KEY, b"x")
