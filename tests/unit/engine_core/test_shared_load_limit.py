"""Loads that share a time limit, with a clock of their own and a sidecar that never has the rows."""

from types import SimpleNamespace

import numpy as np
import pytest

from lmcache_client.core.jobs import EngineIdentity
from lmcache_client.core.paged import blocking
from lmcache_client.core.paged.blocking import BlockingAccess, Limits
from lmcache_client.rpc.hello import ClientHello, Role
from lmcache_store.kv_groups import GroupKind, KVGroup
from lmcache_store.tiers.memory.contracts import LookupResult

LIMITS = Limits(row_seconds=60.0, load_seconds=5.0)


@pytest.fixture
def clock(monkeypatch):
    """A clock that runs only while a load sleeps."""
    now = SimpleNamespace(seconds=100.0)

    def sleep(seconds):
        now.seconds += seconds

    monkeypatch.setattr(blocking, "time", SimpleNamespace(monotonic=lambda: now.seconds, sleep=sleep))
    return now


@pytest.fixture
def access(clock):
    groups = tuple(KVGroup(number, 64, 4096, 0, GroupKind.FULL_ATTENTION) for number in range(3))
    hello = ClientHello(
        role=Role.WORKER, engine_uuid=b"e" * 16, namespace=b"n" * 32, chunk_tokens=64, groups=groups,
        num_columns=1, column=0, private_reason="", model="",
    )  # fmt: skip
    session = SimpleNamespace(
        epoch=1,
        index=SimpleNamespace(find=lambda words: SimpleNamespace(rows=np.array([]))),
        lookup=lambda *_, **__: LookupResult(0, 0, 1, False),
        release=lambda *_, **__: None,
    )
    client = SimpleNamespace(session=session, release_later=lambda _: None, close=lambda: None)
    opened = BlockingAccess(
        client, EngineIdentity(hello, 64, 1, False), SimpleNamespace(close=lambda: None), LIMITS
    )
    yield opened
    opened.close()


def test_loads_of_one_operation_wait_as_long_as_one_load(access, clock):
    began_at = clock.seconds
    for group in range(3):
        assert access.load(group, [b"p" * 32], [0], began_at) == 0
    assert clock.seconds - began_at == pytest.approx(LIMITS.load_seconds, abs=0.1)


def test_loads_of_several_operations_have_a_limit_each(access, clock):
    began_at = clock.seconds
    for group in range(3):
        assert access.load(group, [b"p" * 32], [0]) == 0
    assert clock.seconds - began_at == pytest.approx(3 * LIMITS.load_seconds, abs=0.3)
