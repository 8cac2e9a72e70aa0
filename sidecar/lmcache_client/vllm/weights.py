"""Notices calls that may change the weights of vLLM's model, so that no KV of other weights is found.

vLLM resets its caches for many reasons, and a pause for new weights resets them *before* the change. A reset
therefore does not say whether the weights are the same. In a server, the engine core runs in a process of its
own, and only ``EngineCore.collective_rpc`` leads from the API to the model: ``/update_weights``,
``/collective_rpc`` and all others. Each call of a method that is not known to be harmless counts as a change.
LoRA adapters have a call of their own, and their fingerprints are in the keys (``extra_keys``).

Elsewhere, such as in a trainer that contains the engine, a program can write to the model without a call. The
same holds for workers of other classes. Each reset that includes the connector then counts as a change.

Source: vLLM 0.29 to 0.33, ``v1/engine/core.py`` and ``v1/engine/utils.py``.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable
from typing import Any

from lmcache_client.errors import private_until_restart

_HARMLESS = {"compute_weight_checksums", "get_model_inspection", "update_max_model_len"}
_PROCESS = "EngineCore"
"""Beginning of the name that vLLM gives the process of an engine core."""


def watch_weights(
    vllm_config: Any, on_change: Callable[[str], None], on_adapter: Callable[[Any], None]
) -> bool:
    """Call ``on_change`` with a reason before each call that may change weights.

    ``on_adapter``: called with vLLM's LoRARequest before each load of an adapter. Returns False if weights
    may change without a call.
    """
    from vllm.v1.engine.core import EngineCore

    if not multiprocessing.current_process().name.startswith(_PROCESS):
        return False
    call, add_lora = EngineCore.collective_rpc, EngineCore.add_lora

    @functools.wraps(call)
    def watched(core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        name = method if isinstance(method, str) else "a function"
        if name not in _HARMLESS:
            on_change(private_until_restart(f"vLLM's weights may have changed (call of {name:.80})"))
        return call(core, method, *args, **kwargs)

    @functools.wraps(add_lora)
    def load(core: Any, adapter: Any) -> Any:
        on_adapter(adapter)
        return add_lora(core, adapter)

    EngineCore.collective_rpc, EngineCore.add_lora = watched, load
    parallel = vllm_config.parallel_config
    is_local = parallel.distributed_executor_backend in ("mp", "uni")
    has_known_workers = str(parallel.worker_cls).startswith("vllm.") and not parallel.worker_extension_cls
    return is_local and has_known_workers
