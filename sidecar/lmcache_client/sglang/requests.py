"""Reports SGLang's requests to the sidecar, for its counts, samples and sizes.

SGLang asks a storage backend only for pages that it does not have, several times while a request waits, and
without the request's name. So the calls of a backend can't be counted as requests. This module wraps the
function that prepares a batch of prompts. There, SGLang has decided which tokens of each prompt come from its
device cache, its host cache and the storage.

The wrapper runs on the scheduler's thread. It only queues a few numbers; another thread hashes the prompt.

Source: SGLang 0.5.23, ``managers/schedule_batch.py``, ``ScheduleBatch.prepare_for_extend``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from lmcache_client.core.paged.blocking import PagedRequest

logger = logging.getLogger(__name__)

Reporter = Callable[[PagedRequest], None]

_HEALTH_CHECK = "HEALTH_CHECK"
"""Beginning of the names of requests of one token that SGLang makes to answer ``/health``.

Source: SGLang 0.5.23, ``constants.py``, ``HEALTH_CHECK_RID_PREFIX``.
"""

_reporters: list[Reporter] = []
"""The backend of this process that reports requests, if any."""


def subscribe(reporter: Reporter, page_tokens: int) -> Callable[[], None]:
    """Call ``reporter`` for each request whose prompt SGLang begins to compute.

    Returns a function that ends this. If SGLang lacks the expected function, a warning says that requests are
    not counted.
    """
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    function = getattr(ScheduleBatch, "prepare_for_extend", None)
    if function is None:
        logger.warning("This version of SGLang does not show its requests: the cache can't count them")
        return lambda: None
    _reporters.append(reporter)
    if not hasattr(function, "_lmcache_watched"):
        ScheduleBatch.prepare_for_extend = _watched(function, page_tokens)

    def unsubscribe() -> None:
        with contextlib.suppress(ValueError):  # an error has ended all reports
            _reporters.remove(reporter)

    return unsubscribe


def _watched(function: Callable[..., Any], page_tokens: int) -> Callable[..., Any]:
    @functools.wraps(function)
    def watched(batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(batch, *args, **kwargs)
        if _reporters:
            try:
                _report_batch(batch, page_tokens)
            except Exception:
                _reporters.clear()
                logger.exception("Requests are not counted any more")
        return result

    watched._lmcache_watched = True  # type: ignore[attr-defined]
    return watched


def _report_batch(batch: Any, page_tokens: int) -> None:
    for request in batch.reqs:
        # A request is counted once: not for a later part of its prompt, nor when it starts again.
        if request.extend_batch_idx != 1 or request.retracted_stain:
            continue
        if request.rid.startswith(_HEALTH_CHECK):
            continue
        prompt = request.origin_input_ids
        key = prompt, request.extra_key, request.cache_salt, _has_pairs(batch), page_tokens
        reported = PagedRequest(
            functools.partial(_hash_pages, *key),
            len(prompt),
            request.cached_tokens_device + request.cached_tokens_host,
            request.cached_tokens_storage,
        )
        for reporter in _reporters:
            reporter(reported)


def _has_pairs(batch: Any) -> bool:
    """Return whether SGLang hashes pairs of tokens, as it does with some kinds of speculative decoding."""
    return bool(getattr(getattr(batch.tree_cache, "tree_core", None), "is_eagle", False))


def _hash_pages(
    prompt: Sequence[int], extra_key: str | None, salt: str | None, has_pairs: bool, page_tokens: int
) -> list[bytes]:
    """Return SGLang's hashes of the pages of a prompt that it can load: it always computes the last token."""
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    key = RadixKey(prompt[:-1], extra_key=extra_key, is_bigram=has_pairs, cache_salt=salt)
    hashes = get_storage_hash_str(key.page_aligned(page_tokens), None, page_size=page_tokens)
    return list(map(bytes.fromhex, hashes))
