"""Waits for pages from lower tiers, with a clock of their own and a sidecar that never has the rows."""

from types import SimpleNamespace

import numpy as np
import pytest

from lmcache_client.core.jobs import EngineIdentity
from lmcache_client.core.paged import blocking
from lmcache_client.core.paged.blocking import BlockingAccess, Limits
from lmcache_client.rpc.hello import ClientHello, Role
from lmcache_store.kv_groups import GroupKind, KVGroup
from lmcache_store.tiers.memory.contracts import LookupResult

LIMITS = Limits(lookup_seconds=2.0, row_seconds=60.0, load_seconds=5.0)
PAGE = b"p" * 32


@pytest.fixture
def clock(monkeypatch):
    """A clock that runs only while a lookup or a load sleeps."""
    now = SimpleNamespace(seconds=100.0, after_sleep=lambda: None)

    def sleep(seconds):
        now.seconds += seconds
        now.after_sleep()

    monkeypatch.setattr(blocking, "time", SimpleNamespace(monotonic=lambda: now.seconds, sleep=sleep))
    return now


@pytest.fixture
def client():
    session = SimpleNamespace(
        epoch=1,
        index=SimpleNamespace(find=lambda words: SimpleNamespace(rows=np.array([]))),
        lookup=lambda *_, **__: LookupResult(0, 0, 1, False),
        release=lambda *_, **__: None,
    )
    return SimpleNamespace(session=session, release_later=lambda _: None, close=lambda: None)


@pytest.fixture
def access(request, client, clock):
    groups = tuple(KVGroup(number, 64, 4096, 0, GroupKind.FULL_ATTENTION) for number in range(3))
    hello = ClientHello(
        role=Role.WORKER, engine_uuid=b"e" * 16, namespace=b"n" * 32, chunk_tokens=64, groups=groups,
        num_columns=1, column=0, private_reason="", model="",
    )  # fmt: skip
    identity, copier = EngineIdentity(hello, 64, 1, False), SimpleNamespace(close=lambda: None)
    opened = BlockingAccess(client, identity, copier, getattr(request, "param", LIMITS))
    yield opened
    opened.close()


def test_loads_of_one_operation_wait_as_long_as_one_load(access, clock):
    began_at = clock.seconds
    for group in range(3):
        assert access.load(group, [PAGE], [0], began_at) == 0
    assert clock.seconds - began_at == pytest.approx(LIMITS.load_seconds, abs=0.1)


def test_loads_of_several_operations_have_a_limit_each(access, clock):
    began_at = clock.seconds
    for group in range(3):
        assert access.load(group, [PAGE], [0]) == 0
    assert clock.seconds - began_at == pytest.approx(3 * LIMITS.load_seconds, abs=0.3)


@pytest.mark.parametrize("access", [LIMITS, Limits(row_seconds=5.0, load_seconds=60.0)], indirect=True)
def test_load_ends_after_the_limit_of_a_row_or_of_the_load(access, clock):
    began_at = clock.seconds
    assert access.load(0, [PAGE], [0]) == 0
    assert clock.seconds - began_at == pytest.approx(5.0, abs=0.1)


def test_lookup_waits_for_lower_tiers_within_its_limit(access, client, clock):
    client.session.lookup = lambda *_, **__: LookupResult(is_probing=True)
    began_at = clock.seconds
    assert access.count_hits([PAGE]) == 0
    assert clock.seconds - began_at == pytest.approx(LIMITS.lookup_seconds, abs=0.1)


@pytest.mark.parametrize("is_lost", [True, False], ids=["sidecar is lost", "another namespace"])
def test_wait_ends_with_the_sidecar_or_the_namespace(access, client, clock, is_lost):
    def change():
        if is_lost:
            client.session = None
        else:
            access.set_namespace(b"o" * 32)

    clock.after_sleep = change
    began_at = clock.seconds
    assert access.load(0, [PAGE], [0]) == 0
    assert clock.seconds - began_at < 0.1
