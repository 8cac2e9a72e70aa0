"""The command line of `vllm serve`."""

from __future__ import annotations

import json
import re

from ..api.parse import Cluster, InvalidSpec
from .names import ENGINE_PORT
from .paths import SOCKET_PATH

_RESERVED = {
    "--host": "the probes and Services expect the engine on all addresses",
    "--port": f"the Services expect the engine on port {ENGINE_PORT}",
    "--prefix-caching-hash-algo": "chunk keys must be the same in every pod",
    "--no-enable-prefix-caching": "the keys of cached chunks are made of the engine's own block hashes",
    "--kv-transfer-config": "it loads LMCache, and no other connector can run beside it in this version",
    "--model": "it is set by spec.model.name",
    "--revision": "it is set by spec.model.revision",
    "--tensor-parallel-size": "it is set by spec.engine.parallelism.tensor",
    "--pipeline-parallel-size": "it is set by spec.engine.parallelism.pipeline",
}


def flag_of(arg: str) -> str:
    """The option an argument sets, as the engine reads it: without its value and parts, `_` as `-`.

    The engine takes the beginning of an option for the whole. Where that may be one of ours, it is taken so.
    """
    name = re.split("[=.]", arg, maxsplit=1)[0]
    if not name.startswith("--") or name == "--":
        return name
    name = name.replace("_", "-")
    return next((ours for ours in _RESERVED if ours.startswith(name)), name)


def engine_args(cluster: Cluster) -> list[str]:
    """Arguments after `vllm serve`: the model, ours sorted by name, then the user's in their order.

    Raises:
        InvalidSpec: an argument of the user breaks what the cache needs.
    """
    parallelism, model = cluster.spec.engine.parallelism, cluster.spec.model
    user_args = cluster.spec.engine.args
    flags = [flag_of(arg) for arg in user_args]
    for index, flag in enumerate(flags):
        if flag in _RESERVED:
            raise InvalidSpec(f"spec.engine.args[{index}]", f"{flag} can't be set: {_RESERVED[flag]}")
    ours = {
        "--kv-transfer-config": _kv_transfer_config(cluster),
        "--pipeline-parallel-size": parallelism.pipeline,
        "--port": ENGINE_PORT,
        "--prefix-caching-hash-algo": "sha256_cbor",
        "--tensor-parallel-size": parallelism.tensor,
    }
    if model.revision is not None:
        ours["--revision"] = model.revision
    if "--served-model-name" not in flags:
        ours["--served-model-name"] = model.name
    return [model.name, *(f"{name}={ours[name]}" for name in sorted(ours)), *user_args]


def _kv_transfer_config(cluster: Cluster) -> str:
    config = {
        "kv_connector": "LMCacheClusterConnector",
        "kv_connector_module_path": "lmcache.engines.vllm.connector",
        "kv_role": "kv_both",
        # A chunk that can't be loaded costs a recomputation, never a request.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "lmcache.socket": SOCKET_PATH,
            "lmcache.chunk_tokens": cluster.spec.sidecar.chunk_tokens,
        },
    }
    return json.dumps(config, sort_keys=True, separators=(",", ":"))
