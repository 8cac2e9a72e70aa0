"""The command line of `vllm serve`."""

from __future__ import annotations

import json
from typing import Any

from ..api.parse import Cluster, InvalidSpec
from ..api.types import flag_of
from .names import ENGINE_PORT
from .paths import SOCKET_PATH

_ARGS = "spec.engine.args"
_KV_TRANSFER = "--kv-transfer-config"
_RESERVED = {
    "--host": "the probes and Services expect the engine on all addresses",
    "--port": f"the Services expect the engine on port {ENGINE_PORT}",
    "--prefix-caching-hash-algo": "chunk keys must be the same in every pod",
    "--no-enable-prefix-caching": "the keys of cached chunks are made of the engine's own block hashes",
    "--model": "it is set by spec.model.name",
    "--revision": "it is set by spec.model.revision",
}


def engine_args(cluster: Cluster) -> list[str]:
    """Arguments after `vllm serve`: the model, ours sorted by name, then the user's in their order.

    Raises:
        InvalidSpec: an argument of the user breaks what the cache needs.
    """
    theirs, user_args = _split_kv_transfer(cluster.spec.engine.args)
    for index, arg in enumerate(user_args):
        if reason := _RESERVED.get(flag_of(arg)):
            raise InvalidSpec(f"{_ARGS}[{index}]", f"{flag_of(arg)} can't be set: {reason}")
    parallelism, model = cluster.spec.engine.parallelism, cluster.spec.model
    ours = {
        _KV_TRANSFER: json.dumps(_kv_transfer_config(cluster, theirs), sort_keys=True, separators=(",", ":")),
        "--pipeline-parallel-size": parallelism.pipeline,
        "--port": ENGINE_PORT,
        "--prefix-caching-hash-algo": "sha256_cbor",
        "--tensor-parallel-size": parallelism.tensor,
    }
    if model.revision is not None:
        ours["--revision"] = model.revision
    if not any(flag_of(arg) == "--served-model-name" for arg in user_args):
        ours["--served-model-name"] = model.name
    return [model.name, *(f"{name}={ours[name]}" for name in sorted(ours)), *user_args]


def _kv_transfer_config(cluster: Cluster, theirs: dict[str, Any] | None) -> dict[str, Any]:
    ours = {
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
    if theirs is None:
        return ours
    others = [theirs]
    if theirs.get("kv_connector") == "MultiConnector":
        others = theirs.get("kv_connector_extra_config", {}).get("connectors", [])
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [ours, *others]},
    }


def _split_kv_transfer(args: list[str]) -> tuple[dict[str, Any] | None, list[str]]:
    """Take a --kv-transfer-config, as one argument or as two, out of the user's arguments."""
    config: dict[str, Any] | None = None
    rest: list[str] = []
    remaining = iter(enumerate(args))
    for index, arg in remaining:
        flag = flag_of(arg)
        if flag.startswith(f"{_KV_TRANSFER}."):
            raise InvalidSpec(f"{_ARGS}[{index}]", f"write {_KV_TRANSFER} as one JSON object, not in parts")
        if flag != _KV_TRANSFER:
            rest.append(arg)
            continue
        if config is not None:
            raise InvalidSpec(f"{_ARGS}[{index}]", f"{_KV_TRANSFER} is given twice")
        text = arg.split("=", 1)[1] if "=" in arg else next(remaining, (0, ""))[1]
        config = _parse_kv_transfer(text, f"{_ARGS}[{index}]")
    return config, rest


def _parse_kv_transfer(text: str, path: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise InvalidSpec(path, f"{_KV_TRANSFER} is not JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("kv_connector"), str):
        raise InvalidSpec(path, f"{_KV_TRANSFER} must be an object that names a kv_connector")
    extra = config.get("kv_connector_extra_config", {})
    if not isinstance(extra, dict) or not isinstance(extra.get("connectors", []), list):
        raise InvalidSpec(path, "kv_connector_extra_config must be an object, and its connectors a list")
    return config
