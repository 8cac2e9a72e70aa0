"""The command line of `vllm serve`."""

from __future__ import annotations

import json
import re
from typing import Any

from ..api.parse import Cluster, InvalidSpec
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
    return next((ours for ours in (_KV_TRANSFER, *_RESERVED) if ours.startswith(name)), name)


def engine_args(cluster: Cluster) -> list[str]:
    """Arguments after `vllm serve`: the model, ours sorted by name, then the user's in their order.

    Raises:
        InvalidSpec: an argument of the user breaks what the cache needs.
    """
    parallelism, model = cluster.spec.engine.parallelism, cluster.spec.model
    theirs, user_args = _split_kv_transfer(cluster.spec.engine.args)
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
        path, flag = f"{_ARGS}[{index}]", flag_of(arg)
        if reason := _RESERVED.get(flag):
            raise InvalidSpec(path, f"{flag} can't be set: {reason}")
        if flag != _KV_TRANSFER:
            rest.append(arg)
            continue
        name, has_value, text = arg.partition("=")
        if "." in name:
            raise InvalidSpec(path, f"write {_KV_TRANSFER} as one JSON object, not in parts")
        if config is not None:
            raise InvalidSpec(path, f"{_KV_TRANSFER} is given twice")
        config = _parse_kv_transfer(text if has_value else next(remaining, (0, ""))[1], path)
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
