"""The life of the backend that SGLang loads, with stand-ins for SGLang's modules and for the sidecar."""

import abc
import contextlib
import importlib
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from lmcache_client.errors import UnsupportedError
from lmcache_client.sglang import attach, options, support, weights
from lmcache_store.common.timing import TIMING

NAMESPACE = b"n" * 32
STORAGE = "sglang.srt.mem_cache.hicache_storage"


class Storage:
    """SGLang's base class of storage backends."""

    def register_mem_pool_host(self, mem_pool_host):
        pass

    def register_mem_host_pool_v2(self, host_pool, host_pool_name):
        pass


class Access:
    """A connection to the sidecar with some pools."""

    is_attached = True
    namespace_at_start = NAMESPACE
    engine_uuid = b"e" * 16

    def __init__(self, pools):
        self.pools, self.namespace, self.is_closed = pools, None, False
        self.loads, self.times = [], []

    def set_namespace(self, namespace, private_reason):
        self.namespace, self.private_reason = namespace, private_reason

    def report(self, request):
        pass

    def load(self, group, hashes, blocks, began_at):
        self.loads.append((group, blocks))
        self.times.append(began_at)
        return len(blocks)

    def close(self):
        self.is_closed = True


class Indices(list):
    """A tensor of indices of the host pool."""

    numel = list.__len__

    def __getitem__(self, part):
        return Indices(super().__getitem__(part))

    def tolist(self):
        return list(self)


@pytest.fixture
def world(monkeypatch, give_module):
    """SGLang's process: the accesses of the backend, and whether SGLang's start loads the backend."""
    state = SimpleNamespace(accesses=[], is_start=True, installs=[], watch=weights.WeightWatch())

    def connect(_config, pools, _settings):
        state.accesses.append(Access(dict(pools)))
        return state.accesses[-1]

    def install(*, is_start):
        state.installs.append((is_start, threading.current_thread()))

    give_module(STORAGE, HiCacheStorage=Storage, PoolTransferResult=SimpleNamespace)
    give_module("sglang.srt.managers.schedule_batch", Req=type("Req", (), {}))
    monkeypatch.delitem(sys.modules, "lmcache_client.sglang.backend", raising=False)
    monkeypatch.setattr(TIMING, "start_seconds", 60.0)
    monkeypatch.setattr(support, "check_version", lambda: None)
    monkeypatch.setattr(weights, "install", install)
    monkeypatch.setattr(weights, "WATCH", state.watch)
    monkeypatch.setattr(attach, "attach", connect)
    monkeypatch.setattr(attach, "is_reporter", lambda _config: False)
    monkeypatch.setattr(
        options,
        "EngineOptions",
        lambda: SimpleNamespace(loads_backend_at_start=state.is_start, enable_lora=False),
    )
    state.backend_class = importlib.import_module("lmcache_client.sglang.backend").LMCacheBackend
    yield state
    sys.modules.pop("lmcache_client.sglang.backend", None)


@pytest.fixture
def make_backend(world):
    with contextlib.ExitStack() as stack:

        def make(pool=None, **extra_config):
            backend = world.backend_class(SimpleNamespace(extra_config={"interface_v1": 1, **extra_config}))
            stack.callback(backend.close)
            backend.register_mem_pool_host(pool or make_pool())
            return backend

        yield make
        join_threads()


def join_threads():
    """Wait until no backend attaches any more."""
    for thread in threading.enumerate():
        if thread.name == "lmcache-begin":
            thread.join(60)
            assert not thread.is_alive()


def make_pool():
    return SimpleNamespace(page_size=2)


def test_weights_are_watched_before_sglang_continues(world, make_backend, monkeypatch):
    """Even if the attachment takes long, no weight update is missed: SGLang could begin one right after."""
    blocked = threading.Event()
    importlib.import_module("lmcache_client.sglang.backend")
    monkeypatch.setattr(TIMING, "start_seconds", 0.0)
    monkeypatch.setattr(attach, "groups_of", lambda _pools: blocked.wait(60) and ["kv"])
    world.is_start = False
    try:
        make_backend().on_host_pools_registered()
        assert world.installs == [(False, threading.current_thread())]
    finally:
        blocked.set()


def test_engine_that_cannot_watch_its_weights_is_not_cached(world, make_backend, monkeypatch, caplog):
    def refuse(*, is_start):
        raise UnsupportedError("weights change in an unknown way")

    monkeypatch.setattr(weights, "install", refuse)
    backend = make_backend()
    backend.on_host_pools_registered()
    backend.register_mem_host_pool_v2(make_pool(), "draft")
    assert not world.accesses
    assert "weights change in an unknown way" in caplog.text
    assert backend.batch_get_v1(["00" * 32], Indices([0, 1])) == [False]


def test_pool_of_a_draft_model_is_cached(world, make_backend):
    """SGLang adds the pool of a draft model after the other pools."""
    kv = make_pool()
    backend = make_backend(kv)
    backend.register_mem_host_pool_v2(kv, "kv")
    backend.on_host_pools_registered()
    backend.register_mem_host_pool_v2(kv, "kv")
    assert [access.is_closed for access in world.accesses] == [False], "a known pool changes nothing"
    draft = make_pool()
    backend.register_mem_host_pool_v2(draft, "draft")
    first, second = world.accesses
    assert (first.is_closed, first.pools) == (True, {"kv": kv})
    assert (second.is_closed, second.pools) == (False, {"kv": kv, "draft": draft})
    transfer = SimpleNamespace(name="draft", keys=["00" * 32], host_indices=Indices([4, 5]))
    assert (backend.batch_get_v2([transfer]), second.loads) == ({"draft": [True]}, [(1, [2])])
    world.watch.forget_all()
    assert second.namespace == world.watch.name(NAMESPACE, second.engine_uuid)
    assert second.private_reason.startswith("SGLang's weights or its storage were reset at ")
    backend.close()
    assert second.is_closed


def test_pools_of_one_operation_share_a_time_limit(world, make_backend):
    """SGLang ends the engine if a flush waits more than 10 s for the loads of an operation."""
    backend = make_backend()
    backend.register_mem_host_pool_v2(make_pool(), "indexer")
    backend.register_mem_host_pool_v2(make_pool(), "draft")
    backend.on_host_pools_registered()
    (access,) = world.accesses

    def load(key, *, is_first=True):
        request = {"keys": [key], "host_indices": Indices([0, 1])}
        if is_first:
            backend.batch_get_v1(*request.values())
        backend.batch_get_v2([SimpleNamespace(name=name, **request) for name in ("indexer", "draft")])
        times, access.times = access.times, []
        return times

    a, b = load("00" * 32), load("11" * 32)
    windows = load("22" * 32, is_first=False)  # an operation of its own
    assert [len(times) for times in (a, b, windows)] == [3, 3, 2]
    assert a[0] == a[1] == a[2] < b[0] == b[1] == b[2] < windows[0] == windows[1]


def test_pool_that_comes_while_the_backend_attaches_is_cached(world, make_backend, monkeypatch):
    importlib.import_module("lmcache_client.sglang.backend")
    began, may_end = threading.Event(), threading.Event()
    connect = attach.attach

    def connect_slowly(config, pools, settings):
        access = connect(config, pools, settings)
        if len(world.accesses) == 1:
            began.set()
            may_end.wait(60)
        return access

    monkeypatch.setattr(attach, "attach", connect_slowly)
    monkeypatch.setattr(TIMING, "start_seconds", 0.0)
    backend = make_backend()
    backend.on_host_pools_registered()
    assert began.wait(60)
    monkeypatch.setattr(TIMING, "start_seconds", 60.0)
    backend.register_mem_host_pool_v2(make_pool(), "draft")
    may_end.set()
    join_threads()
    first, second = world.accesses
    assert (first.is_closed, set(second.pools)) == (True, {"kv", "draft"})
    assert backend.batch_get_v1(["00" * 32], Indices([6, 7])) == [True]
    assert (first.loads, second.loads) == ([], [(0, [3])])


def test_backend_that_attaches_at_the_second_attempt_is_not_called_off(make_backend, monkeypatch, caplog):
    connect = attach.attach

    def connect_later(config, pools, settings):
        if "draft" not in pools:
            raise OSError("weights cannot be read")
        return connect(config, pools, settings)

    monkeypatch.setattr(attach, "attach", connect_later)
    backend = make_backend()
    backend.on_host_pools_registered()
    backend.register_mem_host_pool_v2(make_pool(), "draft")
    backend._off._reminders._clock = lambda: time.monotonic() + 601
    backend.batch_get_v1(["00" * 32], Indices([6, 7]))
    assert caplog.text.count("is OFF") == 1


def test_backend_that_failed_says_again_that_it_is_off(make_backend, caplog):
    backend = make_backend()
    backend._pools = None
    backend.register_mem_host_pool_v2(make_pool(), "draft")
    backend._off._reminders._clock = lambda: time.monotonic() + 601
    assert backend.batch_exists(["00" * 32]) == 0
    assert caplog.text.count("is OFF, the engine runs without its cache: the backend failed") == 2


def test_engine_of_another_version_starts_without_the_cache(world, monkeypatch, give_module, caplog):
    """An older version lacks classes, and a later one may ask for more methods."""

    class OtherStorage(Storage, abc.ABC):
        @abc.abstractmethod
        def batch_touch(self, keys):
            """Mark pages as used."""

    def refuse():
        raise UnsupportedError("SGLang 0.1 is not supported")

    give_module(STORAGE, HiCacheStorage=OtherStorage)
    monkeypatch.setattr(support, "check_version", refuse)
    sys.modules.pop("lmcache_client.sglang.backend")
    other = importlib.import_module("lmcache_client.sglang.backend")
    backend = other.LMCacheBackend(SimpleNamespace(extra_config=None), {})
    assert "SGLang 0.1 is not supported" in caplog.text
    backend.register_mem_pool_host(make_pool())
    backend.on_host_pools_registered()
    assert not world.installs
    assert backend.batch_exists(["00" * 32]) == 0
    assert backend.batch_set_v1(["00" * 32], Indices([0, 1])) == [False]
    backend._off._reminders._clock = lambda: time.monotonic() + 601
    assert backend.batch_exists(["00" * 32]) == 0
    assert caplog.text.count("is OFF, the engine runs without its cache: this engine cannot be cached: ") == 2
    backend.close()
