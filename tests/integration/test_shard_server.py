"""The rendered container of a shard, run as a process: a real server with its rights and limits."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmcache_operator.api.parse import parse
from lmcache_operator.components.remote.pod import store_bytes
from lmcache_operator.components.remote.remote import Remote
from lmcache_operator.contract.base import Context
from lmcache_operator.specs.names import REMOTE_PORT, REMOTE_USER, STOCK_IMAGES
from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.errors import ServerError, TierUnavailableError
from lmcache_store.tiers.probing import num_leading
from lmcache_store.tiers.remote.address import Address, AddressKind, Endpoint
from lmcache_store.tiers.remote.marks import MarksQuery
from lmcache_store.tiers.remote.resp import RespConnection
from lmcache_store.tiers.remote.tier import RemoteTier
from lmcache_store.tiers.remote.topology import ShardList
from testing.certificates import Certificates, make_certificates
from testing.child_process import free_port, wait_until
from testing.kube.shards import MountedSecret, ShardProcess
from tests.harness.operator.model import cluster
from tests.harness.tiers.remote_objects import KEY, load, pattern

pytestmark = pytest.mark.redis

PASSWORD = "p'a$s \"w\\ord"


class Shard(ShardProcess):
    """A shard of a cluster with this ``managed`` spec."""

    def __init__(self, folder: Path, port: int, **managed: Any) -> None:
        resource = cluster(tiers={"remote": {"managed": {"memoryPerShard": "512Mi", **managed}}})
        spec = Remote().render(parse(resource), Context(STOCK_IMAGES))[-1]["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        replaced = {"sleep 10": "sleep 0.1", f"port {REMOTE_PORT}": f"port {port}"}
        super().__init__(folder, container, has_tls="tls" in managed, replaced=replaced)
        self.port = port
        self.auth.write(password=f"{PASSWORD}\n")


def write_certificate(secret: MountedSecret, certificates: Certificates) -> None:
    files = {"tls.crt": certificates.cert, "tls.key": certificates.key, "ca.crt": certificates.ca}
    secret.write(**{name: path.read_text() for name, path in files.items()})


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    with Shard(tmp_path, free_port()) as shard:
        assert not shard.is_alive()
        shard.start()
        yield shard


def tier(shard: Shard, password: str = PASSWORD, host: str = "127.0.0.1") -> RemoteTier:
    address = Address.parse(f"redis://{REMOTE_USER}@{host}:{shard.port}")
    return RemoteTier(replace(address, password=password), timeout_seconds=60)


def names_in_session(session: int) -> Iterator[str]:
    """Names of the processes in a session."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            if os.getsid(int(process.name)) == session:
                yield (process / "comm").read_text().strip()


def test_probe_of_a_hanging_server_ends_when_killed(shard):
    """The kubelet kills a probe, and then waits for every process that could still write an answer."""
    shard.freeze()
    probe = subprocess.Popen(shard.probe, stdout=subprocess.PIPE, start_new_session=True)
    try:
        wait_until(lambda: any(name.endswith("-cli") for name in names_in_session(probe.pid)), timeout=60)
        probe.kill()
        assert probe.communicate(timeout=60) == (b"", None)
    finally:
        shard.thaw()
    assert shard.is_alive()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_sidecar_has_the_rights_that_it_needs(host, shard):
    remote = tier(shard, host=host)
    assert remote.store(ObjectId(KEY, 0), memoryview(pattern(5 << 20)))
    assert load(remote) == pattern(5 << 20)
    assert num_leading(remote, [KEY], 1) == 1
    assert remote.touch([KEY], 1) == set()
    assert remote.exchange_marks(KEY[:32], b"mark___1", 1, 9, MarksQuery(0, 9)) == b"mark___1"
    remote.check()
    assert remote.used_bytes > 5 << 20
    remote.close()


def test_sidecar_of_an_earlier_release_has_the_rights_that_it_needs(shard):
    """The earlier sidecar runs until its pod is replaced. It stores each part of a row as a string."""
    endpoint = Endpoint("127.0.0.1", shard.port)
    address = Address(AddressKind.SHARDS, (endpoint,), username=REMOTE_USER, password=PASSWORD)
    with contextlib.closing(RespConnection(endpoint, address, 60)) as connection:
        assert connection.call("SET", "lmc1:old", "x") == b"OK"
        assert connection.call("GET", "lmc1:old") == b"x"
        assert connection.call("EXISTS", "lmc1:old") == connection.call("TOUCH", "lmc1:old") == 1
        assert connection.call("UNLINK", "lmc1:old") == 1, "a new sidecar replaces values of another type"


def test_other_users_and_commands_are_refused(shard):
    def refusal(*words: str, username: str = REMOTE_USER, password: str = PASSWORD) -> str:
        endpoint = Endpoint("127.0.0.1", shard.port)
        address = Address(AddressKind.SHARDS, (endpoint,), username=username, password=password)
        with (
            pytest.raises((ServerError, ConnectionError)) as caught,
            contextlib.closing(RespConnection(endpoint, address, 60)) as connection,
        ):
            connection.call(*words)
        return str(caught.value)

    assert "NOAUTH" in refusal("PING", password="")
    assert "WRONGPASS" in refusal("PING", password="x")
    assert "WRONGPASS" in refusal("PING", username="default")
    for words in (["FLUSHALL"], ["CONFIG", "GET", "*"], ["KEYS", "*"], ["SCAN", "0"], ["EVAL", "1", "0"],
                  ["SUBSCRIBE", "x"], ["GET", "else"], ["SET", "lmc2:x", "y"]):  # fmt: skip
        assert "NOPERM" in refusal(*words)


def test_server_evicts_within_its_limit_and_persists_nothing(shard):
    remote = tier(shard)
    remote.check()
    (usage,) = remote._usages.values()
    assert usage.max_bytes == store_bytes(512 << 20) == 256 << 20
    assert [store_bytes(gib << 30) for gib in (1, 32)] == [768 << 20, (32 << 30) - (32 << 30) // 5]
    assert remote.store(ObjectId(KEY, 0), memoryview(b"x"))
    assert shard.terminate() == 0
    shard.start()
    assert load(remote) is None
    remote.close()


def test_server_does_not_start_without_a_password(tmp_path):
    with Shard(tmp_path, free_port()) as shard:
        shard.auth.write(password="")
        shard.spawn(shard.argv)
        assert shard.wait() == 1
        assert "the Secret has no key" in shard.log


# ---- changes while the server runs ----


def refusal(shard: Shard, password: str) -> str:
    """The error of a client with this password. Empty if the server accepts it."""
    with contextlib.closing(tier(shard, password)) as remote:
        try:
            load(remote)
        except TierUnavailableError as error:
            return str(error)
        return ""


def test_password_rotation_causes_no_miss(shard):
    """Sidecars see each change at any later time."""
    connected = tier(shard)
    assert connected.store(ObjectId(KEY, 0), memoryview(b"x"))
    assert "WRONGPASS" in refusal(shard, "new")

    def check_access(*passwords: str) -> None:
        for remote in (connected, *(tier(shard, password) for password in passwords)):
            assert load(remote) == b"x"
            assert remote.stats.failures == 0
            if remote is not connected:
                remote.close()

    shard.auth.write(password=PASSWORD, other="new")
    wait_until(lambda: not refusal(shard, "new"))
    check_access(PASSWORD, "new")
    shard.auth.write(password="new\n", other=PASSWORD)
    check_access(PASSWORD, "new")
    shard.auth.write(password="new\n")
    wait_until(lambda: "WRONGPASS" in refusal(shard, PASSWORD))
    check_access("new")
    connected.close()


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
    """A tier with the shard list that the operator writes."""
    remote, endpoint = tier(shard), Endpoint("127.0.0.1", shard.port)
    remote.set_shards(ShardList((endpoint,), secure=frozenset([endpoint]), ca=str(ca)))
    return remote


def is_trusted(shard: Shard, certificates: Certificates) -> bool:
    with (
        contextlib.closing(secure_tier(shard, certificates.ca)) as remote,
        contextlib.suppress(TierUnavailableError),
    ):
        load(remote)
        return True
    return False


def test_certificate_renewal_after_an_invalid_certificate_causes_no_miss(secure, tmp_path):
    connected = secure_tier(secure, secure.tls.folder / "ca.crt")
    assert connected.store(ObjectId(KEY, 0), memoryview(pattern(5 << 20)))
    assert refusal(secure, PASSWORD), "the server must refuse clients without TLS"
    second = authority(tmp_path, "second")
    first = Certificates(tmp_path / "first/ca.pem", second.cert, second.key)
    assert not is_trusted(secure, second)
    secure.tls.write(**{"tls.crt": "nonsense", "tls.key": ""})
    wait_until(lambda: secure.check() or "certificate: ERR" in secure.log)
    assert is_trusted(secure, first), "an invalid certificate is ignored"
    write_certificate(secure.tls, second)
    wait_until(lambda: is_trusted(secure, second))
    assert not is_trusted(secure, first)
    for remote in (connected, secure_tier(secure, secure.tls.folder / "ca.crt")):
        assert load(remote) == pattern(5 << 20)
        assert remote.stats.failures == 0
        remote.close()


def test_tls_of_a_shard_follows_the_list(secure, tmp_path):
    endpoint, wrong = Endpoint("127.0.0.1", secure.port), authority(tmp_path, "second").ca
    with contextlib.closing(tier(secure)) as remote:
        for ca in wrong, secure.tls.folder / "ca.crt":
            with pytest.raises(TierUnavailableError):
                load(remote)
            remote.set_shards(ShardList((endpoint,), secure=frozenset([endpoint]), ca=str(ca)))
        wait_until(lambda: not remote.health.is_open)
        assert load(remote) is None
