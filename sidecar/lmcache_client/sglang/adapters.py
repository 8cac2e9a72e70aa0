"""Keeps the KV of LoRA adapters apart from the KV of the base model.

SGLang appends the adapter's id to the extra key of a request, and names pages by the result. A client can
send that id as the extra key of a request to the base model. Both requests would then have the same pages, in
SGLang's own caches and in the storage. SGLang derives the id of an adapter in ``--lora-paths`` from its name
and path, so a client may know it.

This module marks the extra keys of requests to the base model. An id never ends with the mark, so no marked
key equals the key of an adapter's request. An engine without adapters computes each request with the base
model, also a request to ``/generate`` whose client names an adapter by ``lora_id``.

Source: SGLang 0.5.23, ``managers/schedule_batch.py``, ``Req.__init__``.
"""

from __future__ import annotations

import functools
from typing import Any

MARK = "|"
"""End of the extra key of each request to the base model. The id of an adapter is a hexadecimal number."""


def separate(has_adapters: bool) -> None:
    """Mark the extra keys of all requests from now on. Only the first call in a process has an effect.

    ``has_adapters``: the engine can compute with adapters.
    """
    from sglang.srt.managers.schedule_batch import Req

    create = Req.__init__
    if hasattr(create, "_lmcache_marks"):
        return

    @functools.wraps(create)
    def create_marked(request: Any, *args: Any, **kwargs: Any) -> None:
        create(request, *args, **kwargs)
        is_base = request.lora_id is None or not has_adapters
        if is_base and request.extra_key is not None:
            request.extra_key += MARK

    create_marked._lmcache_marks = True  # type: ignore[attr-defined]
    Req.__init__ = create_marked
