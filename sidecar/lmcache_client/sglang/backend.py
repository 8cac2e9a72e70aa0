"""A storage backend for SGLang's HiCache: ``lmcache_client.sglang.backend.LMCacheBackend``.

::

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
        '{"backend_name": "lmcache", "module_path": "lmcache_client.sglang.backend",
          "class_name": "LMCacheBackend", "interface_v1": 1, "prefetch_threshold": 64,
          "hicache_storage_pass_prefix_keys": true}'

SGLang calls the methods on threads of its own: one for lookups, one for loads, one for stores. An exception
in the constructor would end the engine's start, and one in a method would lose a request's pages. So no
method raises. If one fails unexpectedly, the backend goes offline, one log line shows the stack, and the
engine continues without it.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from sglang.srt.mem_cache import hicache_storage

from lmcache_client.off_notice import NOT_CACHED, OffNotice
from lmcache_client.sglang import support
from lmcache_store.common.timing import TIMING

if TYPE_CHECKING:
    from lmcache_client.core.paged.blocking import BlockingAccess

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger(__name__)


_ANCHOR = "kv"
"""Name of the pool that all models have."""


def _guarded(neutral: Callable[..., Any]) -> Callable[[F], F]:
    """Decorate a method: return the neutral value while the backend is offline, and if it raises."""

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def guarded(self: LMCacheBackend, *args: Any, **kwargs: Any) -> Any:
            self._off.repeat()
            if self._is_offline:
                return neutral(*args, **kwargs)
            try:
                return method(self, *args, **kwargs)
            except Exception:
                logger.exception("The LMCache backend goes offline, the engine runs on without it")
                self._go_offline()
                return neutral(*args, **kwargs)

        return guarded  # type: ignore[return-value]

    return decorate


def _nothing(*_: Any, **__: Any) -> None: ...


def _none_of_keys(keys: Sequence[str], *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys)


def _none_of_transfers(transfers: Sequence[Any], *_: Any, **__: Any) -> dict[Any, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


class LMCacheBackend(hicache_storage.HiCacheStorage):  # type: ignore[misc]  # sglang is untyped
    """The backend, see the module. ``attach`` makes its connection; ``core.blocking`` does its work."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self._off = OffNotice()
        self._config = storage_config
        self._pools: dict[str, Any] = {}
        self._groups: dict[str, int] = {}  # KV groups by the name of the pool
        self._has_begun = False  # the first pools are complete
        self._is_offline = False
        self._is_closed = False
        self._access: BlockingAccess | None = None  # None: not attached yet, or never
        self._ends: list[Callable[[], None]] = []  # called when the backend closes
        self._last_load: tuple[Sequence[str], float] = ((), 0.0)  # keys of the first pool, and time
        self._lock = threading.Lock()  # protects the end of the attachment against ``close``
        try:
            support.check_version()
        except Exception as error:
            self._off.warn(f"{NOT_CACHED}: {error}")
            self._is_offline = True

    # ---- the life of the backend ----

    @_guarded(_nothing)
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the pool whose pages the methods with ``_v1`` copy."""
        super().register_mem_pool_host(mem_pool_host)
        self._pools[_ANCHOR] = mem_pool_host

    @_guarded(_nothing)
    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take a further pool. SGLang also registers the first pool once more, by its name."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if self._pools.get(str(host_pool_name)) is host_pool:
            return
        self._pools = {**self._pools, str(host_pool_name): host_pool}
        if self._has_begun:
            self._detach()
            self._attach()

    @_guarded(_nothing)
    def on_host_pools_registered(self) -> None:
        """Attach to the sidecar in the background, now that the pools are known.

        SGLang adds the pool of a draft model later. The backend then attaches again.
        """
        try:
            self._note_engine()
        except Exception as error:
            self._off.warn(f"{NOT_CACHED}: {error}")
        else:
            self._has_begun = True
            self._attach()

    def _note_engine(self) -> None:
        """Watch weights and adapters from now on, and note what is known only while SGLang loads the backend.

        This runs on SGLang's scheduler thread, so that no weight update and no request comes before.
        """
        from lmcache_client.sglang import adapters, weights, windows
        from lmcache_client.sglang.options import EngineOptions

        engine = EngineOptions()
        weights.install(is_start=engine.loads_backend_at_start)
        adapters.separate(engine.enable_lora)
        windows.note_radix_cache()

    def _attach(self) -> None:
        """Attach on a thread. Waits at most ``start_seconds``.

        Hashing the weights may take minutes: meanwhile the engine runs without a cache.
        """
        thread = threading.Thread(target=self._begin, args=[self._pools], name="lmcache-begin", daemon=True)
        thread.start()
        thread.join(TIMING.start_seconds)

    def _begin(self, pools: dict[str, Any]) -> None:
        deadline = time.monotonic() + TIMING.start_seconds
        try:
            from lmcache_client.core.settings import read_settings
            from lmcache_client.sglang import attach, requests, weights
            from lmcache_client.sglang.options import SGLangSettings

            settings = read_settings(SGLangSettings, self._config.extra_config or {})
            groups = {name: number for number, name in enumerate(attach.groups_of(pools))}
            access = attach.attach(self._config, pools, settings)
        except Exception as error:  # whatever it is: an engine that can't be cached must run unaffected
            self._off.warn(f"{NOT_CACHED}: {error}")
            return
        with self._lock:
            if is_wanted := not self._is_closed and pools is self._pools:
                self._follow(access, weights.WATCH)
                if attach.is_reporter(self._config):
                    self._ends.append(requests.subscribe(access.report, pools[_ANCHOR].page_size))
                self._groups, self._access = groups, access
        if is_wanted:
            if not self._is_offline:
                self._off.clear()  # an attempt with fewer pools may have failed
            attach.wait_attached(access, deadline)
        else:
            access.close()

    def _follow(self, access: BlockingAccess, watch: Any) -> None:
        """Keep the names of pages up to date with the model's weights."""

        def rename() -> None:
            namespace = watch.name(access.namespace_at_start, access.engine_uuid)
            access.set_namespace(namespace, watch.private_reason)

        self._ends.append(watch.subscribe(rename))

    @_guarded(_nothing)
    def clear(self) -> None:
        """Find nothing of what was stored so far (``/hicache/storage-backend/clear``).

        Other engines share the rows, so they are not deleted. Unused rows are evicted.
        """
        from lmcache_client.sglang.weights import WATCH

        WATCH.forget_all()

    def _go_offline(self) -> None:
        self._is_offline = True
        self._off.warn("the backend failed and is offline until SGLang restarts")
        threading.Thread(target=self.close, name="lmcache-close", daemon=True).start()

    def close(self) -> None:
        """Detach from the sidecar. SGLang has stopped its threads."""
        with self._lock:
            self._is_closed = True
        try:
            self._detach()
        except Exception:
            logger.exception("The LMCache backend did not close cleanly")

    def _detach(self) -> None:
        with self._lock:
            access, self._access = self._access, None
        while self._ends:
            self._ends.pop()()
        if access is not None:
            access.close()

    # ---- one pool ----

    @_guarded(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many leading pages are cached, in memory or in a lower tier."""
        if (access := self._access) is None:
            return 0
        return access.count_hits(_hashes(keys))

    @_guarded(_none_of_keys)
    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Load pages into the first pool. Returns for each page whether it was loaded: leading ones only."""
        self._last_load = keys, time.monotonic()
        return self._load(_ANCHOR, keys, host_indices, self._last_load[1])

    @_guarded(_none_of_keys)
    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages of the first pool. Returns for each page whether it is cached now."""
        return self._store(_ANCHOR, keys, host_indices, extra_info)

    # ---- several pools ----

    @_guarded(lambda *_, **__: hicache_storage.PoolTransferResult.empty())
    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> Any:
        """Return how many leading pages a request can resume after, given the rows of all pools."""
        if (access := self._access) is None:
            return hicache_storage.PoolTransferResult.empty()
        hashes = _hashes(keys)
        num_hits = access.count_hits(hashes)
        names = [_ANCHOR, *(transfer.name for transfer in pool_transfers or ())]
        hits = dict.fromkeys(names, num_hits) if num_hits else {}
        return hicache_storage.PoolTransferResult(num_hits, hits, access.ends(hashes, num_hits))

    @_guarded(_none_of_transfers)
    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Load pages of further pools.

        SGLang calls this for the same pages after ``batch_get_v1``, and can't interrupt it between the two. A
        flush ends the engine if both take more than 10 s. So all pools together wait as long as one.
        """
        keys, began_at = self._last_load
        if any(transfer.keys != keys for transfer in transfers):
            began_at = time.monotonic()
        return {t.name: self._load(str(t.name), t.keys or [], t.host_indices, began_at) for t in transfers}

    @_guarded(_none_of_transfers)
    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Store pages of further pools."""
        return {t.name: self._store(str(t.name), t.keys or [], t.host_indices, extra_info) for t in transfers}

    # ---- the work ----

    def _load(self, pool: str, keys: Sequence[str], host_indices: Any, began_at: float) -> list[bool]:
        access, blocks = self._access, self._pages(pool, keys, host_indices)
        if access is None or blocks is None:
            return [False] * len(keys)
        num_loaded = access.load(self._groups[pool], _hashes(keys), blocks, began_at)
        return [position < num_loaded for position in range(len(keys))]

    def _store(self, pool: str, keys: Sequence[str], host_indices: Any, extra_info: Any) -> list[bool]:
        access, blocks = self._access, self._pages(pool, keys, host_indices)
        if access is None or blocks is None:
            return [False] * len(keys)
        prefix = _hashes(getattr(extra_info, "prefix_keys", None) or ())
        is_stored = access.store(self._groups[pool], _hashes(keys), blocks, prefix)
        return [is_stored] * len(keys)

    def _pages(self, pool: str, keys: Sequence[str], host_indices: Any) -> list[int] | None:
        """Return the numbers of the pages at these indices; None if there is not one index per token."""
        page_size = self._pools[pool].page_size
        if host_indices is None or host_indices.numel() != len(keys) * page_size:
            return None
        return [index // page_size for index in host_indices[::page_size].tolist()]


# SGLang calls the other abstract methods only without ``"interface_v1": 1``. Later versions may have more.
LMCacheBackend.__abstractmethods__ = frozenset()


def _hashes(keys: Sequence[str]) -> list[bytes]:
    return list(map(bytes.fromhex, keys))
