"""What is rendered for a shard, run as a process: a real server with the rights and bounds it should have."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lmcache_operator.api.parse import parse
from lmcache_operator.components.base import Context
from lmcache_operator.components.remote.pod import store_bytes
from lmcache_operator.components.remote.remote import Remote
from lmcache_operator.specs.names import REMOTE_PORT, REMOTE_USER, STOCK_IMAGES

from lmcache.tiers.base import ObjectId
from lmcache.tiers.errors import ServerError, TierUnavailableError
from lmcache.tiers.remote.address import Address, Endpoint, Kind
from lmcache.tiers.remote.resp import Connection
from lmcache.tiers.remote.tier import RemoteTier
from lmcache.tiers.remote.topology import ShardList
from testing.certificates import Certificates, make_certificates
from testing.child_process import free_port, wait_until
from testing.kube.shards import MountedSecret, ShardProcess
from tests.harness.operator_model import cluster
from tests.harness.remote_objects import KEY, load, pattern

pytestmark = pytest.mark.redis

PASSWORD = "p'a$s \"w\\ord"


class Shard(ShardProcess):
    """Of a cluster that declares this."""

    def __init__(self, folder: Path, port: int, **managed: Any) -> None:
        resource = cluster(tiers={"remote": {"managed": {"memoryPerShard": "512Mi", **managed}}})
        spec = Remote().render(parse(resource), Context(STOCK_IMAGES))[-1]["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        replaced = {"sleep 10": "sleep 0.1", f"port {REMOTE_PORT}": f"port {port}"}
        super().__init__(folder, container, has_tls="tls" in managed, replaced=replaced)
        self.port = port
        self.auth.write(password=f"{PASSWORD}\n")


def write_certificate(secret: MountedSecret, made: Certificates) -> None:
    files = {"tls.crt": made.cert, "tls.key": made.key, "ca.crt": made.ca}
    secret.write(**{name: path.read_text() for name, path in files.items()})


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    with Shard(tmp_path, free_port()) as shard:
        assert not shard.is_alive()
        shard.start()
        yield shard


def tier(shard: Shard, password: str = PASSWORD) -> RemoteTier:
    address = Address.parse(f"redis://{REMOTE_USER}@127.0.0.1:{shard.port}")
    return RemoteTier(replace(address, password=password), timeout_seconds=60)


def names_in_session(session: int) -> Iterator[str]:
    """Of its processes."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone
            if os.getsid(int(process.name)) == session:
                yield (process / "comm").read_text().strip()


def test_a_probe_of_a_server_that_hangs_ends_when_it_is_killed(shard):
    """The kubelet kills what it has started, and then waits for all that could still write an answer."""
    shard.freeze()
    probe = subprocess.Popen(shard.probe, stdout=subprocess.PIPE, start_new_session=True)
    try:
        wait_until(lambda: any(name.endswith("-cli") for name in names_in_session(probe.pid)), timeout=60)
        probe.kill()
        assert probe.communicate(timeout=60) == (b"", None)
    finally:
        shard.thaw()
    assert shard.is_alive()


def test_a_sidecar_may_do_all_that_it_does(shard):
    remote = tier(shard)
    assert remote.store(ObjectId(KEY, 0), memoryview(pattern(5 << 20)))
    assert load(remote) == pattern(5 << 20)
    assert remote.probe([KEY], 1) == 1
    assert remote.touch([KEY], 1) == set()
    remote.check()
    assert remote.used_bytes > 5 << 20
    remote.close()


def test_a_sidecar_of_an_earlier_release_may_do_all_that_it_does(shard):
    """Such a sidecar runs on while pods are replaced. It stores each part of a row as a string."""
    endpoint = Endpoint("127.0.0.1", shard.port)
    address = Address(Kind.SHARDS, (endpoint,), username=REMOTE_USER, password=PASSWORD)
    with contextlib.closing(Connection(endpoint, address, 60)) as connection:
        assert connection.call("SET", "lmc1:old", "x") == b"OK"
        assert connection.call("GET", "lmc1:old") == b"x"
        assert connection.call("EXISTS", "lmc1:old") == connection.call("TOUCH", "lmc1:old") == 1
        assert connection.call("UNLINK", "lmc1:old") == 1, "a new sidecar replaces a value of another type"


def test_nobody_else_may_do_anything(shard):
    def refusal(*words: str, username: str = REMOTE_USER, password: str = PASSWORD) -> str:
        endpoint = Endpoint("127.0.0.1", shard.port)
        address = Address(Kind.SHARDS, (endpoint,), username=username, password=password)
        with (
            pytest.raises((ServerError, ConnectionError)) as caught,
            contextlib.closing(Connection(endpoint, address, 60)) as connection,
        ):
            connection.call(*words)
        return str(caught.value)

    assert "NOAUTH" in refusal("PING", password="")
    assert "WRONGPASS" in refusal("PING", password="x")
    assert "WRONGPASS" in refusal("PING", username="default")
    for words in (["FLUSHALL"], ["CONFIG", "GET", "*"], ["KEYS", "*"], ["SCAN", "0"], ["EVAL", "1", "0"],
                  ["SUBSCRIBE", "x"], ["GET", "else"], ["SET", "lmc2:x", "y"]):  # fmt: skip
        assert "NOPERM" in refusal(*words)


def test_it_evicts_within_its_bound_and_keeps_nothing(shard):
    remote = tier(shard)
    remote.check()
    (usage,) = remote._usages.values()
    assert usage.max_bytes == store_bytes(512 << 20) == 256 << 20
    assert remote.store(ObjectId(KEY, 0), memoryview(b"x"))
    assert shard.terminate() == 0
    shard.start()
    assert load(remote) is None
    remote.close()


def test_what_it_may_store_is_what_is_left_of_its_limit():
    assert store_bytes(32 << 30) == (32 << 30) - (32 << 30) // 5
    assert store_bytes(1 << 30) == 768 << 20


def test_without_a_password_it_does_not_start(tmp_path):
    with Shard(tmp_path, free_port()) as shard:
        shard.auth.write(password="")
        shard.spawn(shard.argv)
        assert shard.wait() == 1
        assert "the Secret has no key" in shard.log


# -- what is changed while it runs


def refusal(shard: Shard, password: str) -> str:
    """Why nobody gets in with it; empty: one does."""
    with contextlib.closing(tier(shard, password)) as remote:
        try:
            load(remote)
        except TierUnavailableError as error:
            return str(error)
        return ""


def test_a_password_is_changed_without_a_miss(shard):
    """Sidecars see each of the changes when they like."""
    lasting = tier(shard)
    assert lasting.store(ObjectId(KEY, 0), memoryview(b"x"))
    assert "WRONGPASS" in refusal(shard, "new")

    def found(*passwords: str) -> None:
        for remote in (lasting, *(tier(shard, password) for password in passwords)):
            assert load(remote) == b"x"
            assert remote.stats.failures == 0
            if remote is not lasting:
                remote.close()

    shard.auth.write(password=PASSWORD, other="new")
    wait_until(lambda: not refusal(shard, "new"))
    found(PASSWORD, "new")
    shard.auth.write(password="new\n", other=PASSWORD)
    found(PASSWORD, "new")
    shard.auth.write(password="new\n")
    wait_until(lambda: "WRONGPASS" in refusal(shard, PASSWORD))
    found("new")
    lasting.close()


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[Shard]:
    with Shard(tmp_path, free_port(), tls={"secretRef": {"name": "ours"}}) as shard:
        write_certificate(shard.tls, authority(tmp_path, "first"))
        shard.start()
        yield shard


def authority(folder: Path, name: str) -> Certificates:
    (folder / name).mkdir()
    return make_certificates(folder / name)


def secure_tier(shard: Shard, ca: Path) -> RemoteTier:
    """As the list says it."""
    remote, endpoint = tier(shard), Endpoint("127.0.0.1", shard.port)
    remote.set_shards(ShardList((endpoint,), secure=frozenset([endpoint]), ca=str(ca)))
    return remote


def is_trusted(shard: Shard, made: Certificates) -> bool:
    with contextlib.closing(secure_tier(shard, made.ca)) as remote, contextlib.suppress(TierUnavailableError):
        load(remote)
        return True
    return False


def test_a_certificate_is_renewed_without_a_miss(secure, tmp_path):
    lasting = secure_tier(secure, secure.tls.folder / "ca.crt")
    assert lasting.store(ObjectId(KEY, 0), memoryview(pattern(5 << 20)))
    assert refusal(secure, PASSWORD), "without TLS nobody is heard"
    second = authority(tmp_path, "second")
    assert not is_trusted(secure, second)
    write_certificate(secure.tls, second)
    wait_until(lambda: is_trusted(secure, second))
    assert not is_trusted(secure, Certificates(tmp_path / "first/ca.pem", second.cert, second.key))
    for remote in (lasting, secure_tier(secure, secure.tls.folder / "ca.crt")):
        assert load(remote) == pattern(5 << 20)
        assert remote.stats.failures == 0
        remote.close()


def test_a_certificate_that_is_none_changes_nothing_until_it_is_one(secure, tmp_path):
    secure.tls.write(**{"tls.crt": "nonsense", "tls.key": ""})
    wait_until(lambda: secure.check() or "certificate: ERR" in secure.log)
    assert is_trusted(secure, Certificates(tmp_path / "first/ca.pem", Path(), Path()))
    second = authority(tmp_path, "second")
    write_certificate(secure.tls, second)
    wait_until(lambda: is_trusted(secure, second))
