"""Notices when SGLang changes the weights of its model, so that no KV of the old weights is used.

SGLang empties its own caches after an update, but does not tell storage backends. This module therefore wraps
the functions that change weights, and the function that empties the caches::

    update begins ──▶ closed: nothing is found or stored ──▶ caches are emptied ──▶ open, under a new name

Pages that SGLang queued for a store before the update are dropped when the caches are emptied. If an update
does not empty them (``flush_cache=false``), the cache stays closed until a later flush. An update in several
calls (``begin_weight_update`` to ``end_weight_update``) ends with the last call.

The functions belong to the scheduler's process, which also runs the storage backend. They all run on the
scheduler's thread. The state outlives a backend, because SGLang can detach it, update the weights and attach
it again.

Source: SGLang 0.5.23, ``managers/scheduler_components/weight_updater.py``,
``model_executor/model_runner_components/weight_updater.py`` and ``utils/weight_checker.py``.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from lmcache_client.errors import UnsupportedError, private_until_restart
from lmcache_store import keys

logger = logging.getLogger(__name__)

_UPDATES = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
"""Methods of SGLang's WeightUpdater that change weights."""

_TAG = b"lmcache weights 1"


class WeightWatch:
    """Whether the model's weights are those that the engine started with, see the module. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._generation = 0  # weight updates, and requests to forget all KV
        self._is_closed = False
        self._is_flushed = False  # SGLang's caches were emptied since the last change of weights
        self._has_older_kv = False  # SGLang's caches may hold KV from before ``forget_all``
        self._num_open_updates = 0
        self.is_complete = False
        """True if no change of weights was missed: the engine's start installed the watch."""
        self.private_reason = ""
        """Why only this engine can find KV since the last change of ``name``; empty: nothing changed."""
        self._listeners: dict[Callable[[], None], None] = {}

    def name(self, namespace: bytes, engine_uuid: bytes) -> bytes | None:
        """Return the namespace of KV that the present weights compute; None: do not use the cache now.

        After a change, the name is valid in this engine only. It is the same in all ranks of the engine.
        """
        with self._lock:
            if self._is_closed:
                return None
            if not self._generation:
                return namespace
            parts = _TAG, namespace, engine_uuid, b"%d" % self._generation
            return hashlib.sha256(b"".join(map(keys.sized, parts))).digest()

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` now and after each change of ``name``, one call after the other.

        Returns a function that ends this.
        """
        with self._lock:
            self._listeners[listener] = None
            _call(listener)
        return functools.partial(self._listeners.pop, listener, None)

    def forget_all(self) -> None:
        """Use a new name from now on, and another one after the next flush.

        Until then, SGLang may store KV under the new name that it computed before.
        """
        with self._lock:
            self._generation += 1
            self._has_older_kv = True
            self.private_reason = private_until_restart("SGLang's weights or its storage were reset")
        self._notify()

    def begin_change(self) -> None:
        """Close the cache, because weights are about to change."""
        with self._lock:
            was_closed, self._is_closed, self._is_flushed = self._is_closed, True, False
        if not was_closed:
            logger.info("SGLang changes its weights: the cache is off until SGLang empties its own caches")
            self._notify()

    def begin_update(self) -> None:
        """Record that an update in several calls begins."""
        with self._lock:
            self._num_open_updates += 1
        self.begin_change()

    def end_update(self) -> None:
        """Record that an update in several calls ends."""
        with self._lock:
            self._num_open_updates = max(0, self._num_open_updates - 1)
        self._open()

    def note_flushed(self) -> None:
        """Record that SGLang emptied its caches, and the queue of pages to store."""
        with self._lock:
            is_renamed = self._has_older_kv and not self._is_closed  # otherwise ``_open`` renames
            self._is_flushed, self._has_older_kv = True, False
            self._generation += is_renamed
        if is_renamed:
            self._notify()
        self._open()

    def _open(self) -> None:
        with self._lock:
            if not self._is_closed or not self._is_flushed or self._num_open_updates:
                return
            self._generation += 1
            self._is_closed = False
            self.private_reason = private_until_restart("SGLang's weights were updated")
        logger.info("SGLang has new weights: the cache is on, and private to this engine until a restart")
        self._notify()

    def _notify(self) -> None:
        with self._lock:  # a listener that a thread delays must not overwrite a later name with its own
            for listener in list(self._listeners):
                _call(listener)


def _call(listener: Callable[[], None]) -> None:
    try:
        listener()
    except Exception:  # the caller is SGLang's scheduler
        logger.exception("A backend did not notice that the weights changed")


WATCH = WeightWatch()
"""The watch of this process, which has one model."""


def install(*, is_start: bool, watch: WeightWatch = WATCH) -> None:
    """Wrap SGLang's functions, once per process.

    ``is_start``: this is the engine's start. Only the first call counts. Raises UnsupportedError if SGLang
    lacks one of the functions.
    """
    try:
        from sglang.srt.managers import cache_controller
        from sglang.srt.managers.scheduler_components import weight_updater
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
        from sglang.srt.utils.weight_checker import WeightChecker
    except ImportError as error:
        raise UnsupportedError(
            f"this version of SGLang updates weights in an unknown way: {error}"
        ) from error
    names = *_UPDATES, "begin_weight_update", "end_weight_update"
    wanted: list[tuple[Any, str]] = [(WeightUpdater, name) for name in names]
    wanted += [(cache_controller.HiCacheController, "reset"), (weight_updater, "_import_static_state")]
    wanted += [(WeightChecker, "_reset_tensors")]
    for owner, name in wanted:
        if not callable(getattr(owner, name, None)):
            raise UnsupportedError(f"this version of SGLang has no {owner.__name__}.{name}")
    if hasattr(cache_controller.HiCacheController.reset, "_lmcache_watched"):
        return
    watch.is_complete = is_start
    for name in _UPDATES:
        _wrap(WeightUpdater, name, before=watch.begin_change)
    _wrap(WeightChecker, "_reset_tensors", before=watch.begin_change)  # for tests of updates: random weights
    _wrap(WeightUpdater, "begin_weight_update", before=watch.begin_update)
    _wrap(WeightUpdater, "end_weight_update", after=watch.end_update)
    _wrap(cache_controller.HiCacheController, "reset", after=watch.note_flushed)
    # Weights that were released come back, but without a copy on the CPU their content is lost.
    _wrap(weight_updater, "_import_static_state", before=watch.forget_all)


def _wrap(
    owner: Any, name: str, before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None
) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        before()
        result = function(*args, **kwargs)
        after()
        return result

    watched._lmcache_watched = True  # type: ignore[attr-defined]
    setattr(owner, name, watched)
