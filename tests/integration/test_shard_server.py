"""What is rendered for a shard, run as a process: a real server with the rights and bounds it should have."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from lmcache_operator.api.parse import parse
from lmcache_operator.components.base import Context
from lmcache_operator.components.remote.pod import store_bytes
from lmcache_operator.components.remote.remote import Remote
from lmcache_operator.specs import paths
from lmcache_operator.specs.names import REMOTE_PORT, REMOTE_USER, STOCK_IMAGES

from lmcache.tiers.base import ObjectId
from lmcache.tiers.errors import ServerError
from lmcache.tiers.remote.address import Address, Endpoint, Kind
from lmcache.tiers.remote.resp import Connection
from lmcache.tiers.remote.tier import RemoteTier
from testing.child_process import ChildProcess, free_port, wait_until
from tests.harness.operator_model import cluster
from tests.harness.remote_objects import KEY, load, pattern

pytestmark = pytest.mark.redis

PASSWORD = "p'a$s \"w\\ord"


class Shard(ChildProcess):
    """The container of a shard's pod without the container."""

    def __init__(self, folder: Path, port: int) -> None:
        super().__init__("shard", folder / "log")
        self.port = port
        resource = cluster(tiers={"remote": {"managed": {"memoryPerShard": "512Mi"}}})
        spec = Remote().render(parse(resource), Context(STOCK_IMAGES))[-1]["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        here = {paths.REMOTE_AUTH_DIR: folder / "auth", "/run/lmcache": folder / "run"}
        for path in here.values():
            path.mkdir()
        (folder / "auth" / "password").write_text(f"{PASSWORD}\n")

        def placed(words: list[str]) -> list[str]:
            for path, ours in here.items():
                words = [word.replace(path, str(ours)) for word in words]
            return [word.replace(f"port {REMOTE_PORT}", f"port {port}") for word in words]

        self.argv = placed([*container["command"], *container["args"]])
        probe = container["livenessProbe"]["exec"]["command"]
        self.probe = [word.replace(" ping", f" -p {port} ping") for word in probe]

    def is_alive(self) -> bool:
        return subprocess.run(self.probe, capture_output=True, timeout=60, check=False).returncode == 0


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    with Shard(tmp_path, free_port()) as shard:
        assert not shard.is_alive()
        shard.spawn(shard.argv)
        wait_until(lambda: shard.check() or shard.is_alive(), timeout=60)
        yield shard


def tier(shard: Shard) -> RemoteTier:
    address = Address.parse(f"redis://{REMOTE_USER}@127.0.0.1:{shard.port}")
    return RemoteTier(replace(address, password=PASSWORD), timeout_seconds=60)


def test_a_sidecar_may_do_all_that_it_does(shard):
    remote = tier(shard)
    assert remote.store(ObjectId(KEY, 0), memoryview(pattern(5 << 20)))
    assert load(remote) == pattern(5 << 20)
    assert remote.probe([KEY], 1) == 1
    assert remote.touch([KEY], 1) == set()
    remote.check()
    assert remote.used_bytes > 5 << 20
    remote.close()


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
    shard.spawn(shard.argv)
    wait_until(shard.is_alive, timeout=60)
    assert load(remote) is None
    remote.close()


def test_what_it_may_store_is_what_is_left_of_its_limit():
    assert store_bytes(32 << 30) == (32 << 30) - (32 << 30) // 5
    assert store_bytes(1 << 30) == 768 << 20


def test_without_a_password_it_does_not_start(tmp_path):
    with Shard(tmp_path, free_port()) as shard:
        (tmp_path / "auth" / "password").write_text("")
        shard.spawn(shard.argv)
        assert shard.wait() == 1
        assert "the Secret has no key" in shard.log
