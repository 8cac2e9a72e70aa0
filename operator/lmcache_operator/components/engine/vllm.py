"""The command line of ``vllm serve``, and the check of the user's arguments in it. Pure."""

from __future__ import annotations

import json
import re

from lmcache_operator.api.parse import Cluster
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs.names import ENGINE_PORT
from lmcache_operator.specs.paths import SOCKET_PATH

ONE_POD = "an engine is one pod with the ranks of spec.engine.parallelism; for more set spec.engine.replicas"
_NO_CACHE = "the engine would run without its cache"
_HTTP = "the probes and Services expect the engine's HTTP server on a port"
_SPLIT = "engines that split prefill and decode, or encoders, over pods are not supported in this version"
RESERVED = {
    "--host": "the probes and Services expect the engine on all addresses",
    "--port": f"the Services expect the engine on port {ENGINE_PORT}",
    "--uds": _HTTP,
    "--grpc": _HTTP,
    "--headless": _HTTP,
    "--ssl-cert-reqs": "the kubelet's probes have no certificate",
    "--config": "a file may hold options that can't be set: write each into spec.engine.args",
    "--prefix-caching-hash-algo": "chunk keys must be the same in every pod",
    "--no-enable-prefix-caching": "the keys of cached chunks are made of the engine's own block hashes",
    "--enable-sleep-mode": f"it takes KV away under copies, and {_NO_CACHE}",
    "--decode-context-parallel-size": _NO_CACHE,
    "-dcp": _NO_CACHE,
    "--kv-transfer-config": f"it loads LMCache, and no other connector can run next to it; {_SPLIT}",
    "--ec-transfer-config": _SPLIT,
    "--kv-offloading-size": "it would replace LMCache as the engine's KV connector",
    "--model": "it is set by spec.model.name",
    "--revision": "it is set by spec.model.revision",
    "--tensor-parallel-size": "it is set by spec.engine.parallelism.tensor",
    "--pipeline-parallel-size": "it is set by spec.engine.parallelism.pipeline",
    **dict.fromkeys(("--prefill-context-parallel-size", "-pcp", "--data-parallel-size"), ONE_POD),
    **dict.fromkeys(("--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port"), ONE_POD),
    "--": "what follows it would be taken for a second model",
}
"""Reasons why the user may not set an option, by option."""
_READ = (
    *RESERVED, _EXECUTOR := "--distributed-executor-backend", "--block-size", "--served-model-name",
    SHUTDOWN_TIMEOUT := "--shutdown-timeout", SSL_CERTIFICATE := "--ssl-certfile",
)  # fmt: skip
"""Options that are recognised in abbreviated form, too."""


def flag_of(arg: str) -> str:
    """The option that an argument sets, without value and sub-options, and with ``-`` for ``_``.

    vLLM accepts any unambiguous prefix of an option. A prefix that fits an option of ``_READ`` counts as it.
    """
    name = re.split("[=.]", arg, maxsplit=1)[0]
    if name.startswith(("--data-parallel", "--data_parallel", "-dp")):
        return "--data-parallel-size"
    if not name.startswith("--") or name == "--":
        return name[:2] if re.fullmatch("-[nr][0-9]+", name) else name  # -n2 is -n 2
    name = name.replace("_", "-")
    return next((known for known in _READ if known.startswith(name)), name)


def option(args: list[str], name: str) -> str | None:
    """Value of an option in the arguments; the last one counts. None if the option is not set."""
    value = None
    for index, arg in enumerate(args):
        if flag_of(arg) == name:
            _, has_value, text = arg.partition("=")
            value = text if has_value else "".join(args[index + 1 : index + 2])
    return value


def int_option(args: list[str], name: str) -> int | None:
    """Value of an integer option in the arguments; None if it is not set or not an integer."""
    text = option(args, name)
    return int(text) if text is not None and re.fullmatch("[0-9]{1,9}", text) else None


def engine_args(cluster: Cluster, shutdown_seconds: int) -> list[str]:
    """Arguments of ``vllm serve``: the model, the operator's by name, then the user's in their order.

    ``shutdown_seconds``: time for a stopping engine to finish its requests.

    Raises:
        InvalidSpecError: an argument of the user breaks what the cache needs.
    """
    parallelism, model = cluster.engine.parallelism, cluster.model
    user_args = cluster.engine.args
    flags = _checked_flags(user_args, cluster.spec.sidecar.chunk_tokens)
    options = {
        "--kv-transfer-config": _kv_transfer_config(cluster),
        "--pipeline-parallel-size": parallelism.pipeline,
        "--port": ENGINE_PORT,
        "--prefix-caching-hash-algo": "sha256_cbor",
        "--tensor-parallel-size": parallelism.tensor,
    }
    if model.revision is not None:
        options["--revision"] = model.revision
    if "--served-model-name" not in flags:
        options["--served-model-name"] = model.name
    if SHUTDOWN_TIMEOUT not in flags:
        options[SHUTDOWN_TIMEOUT] = shutdown_seconds
    return [model.name, *(f"{name}={options[name]}" for name in sorted(options)), *user_args]


def _checked_flags(args: list[str], chunk_tokens: int) -> list[str]:
    """The option that each argument sets. Raises InvalidSpecError for an argument that breaks the cache."""
    flags = [flag_of(arg) for arg in args]
    may_be_value = False
    for index, (arg, flag) in enumerate(zip(args, flags, strict=True)):
        path = f"spec.engine.args[{index}]"
        if flag in RESERVED:
            raise InvalidSpecError(path, f"{flag} can't be set: {RESERVED[flag]}")
        if not arg.startswith("-") and not may_be_value:
            raise InvalidSpecError(
                path, f"{arg!r} belongs to no option: the engine would take it for a second model"
            )
        may_be_value = "=" not in arg if arg.startswith("-") else may_be_value
    if (executor := option(args, _EXECUTOR)) in ("ray", "external_launcher"):
        path = f"spec.engine.args[{flags.index(_EXECUTOR)}]"
        raise InvalidSpecError(path, f"{_EXECUTOR} can't be {executor}: {ONE_POD}")
    block = int_option(args, "--block-size")
    if block is not None and (block == 0 or chunk_tokens % block):
        path = f"spec.engine.args[{flags.index('--block-size')}]"
        raise InvalidSpecError(
            path, f"spec.sidecar.chunkTokens ({chunk_tokens}) must be a multiple of the block size"
        )
    return flags


def _kv_transfer_config(cluster: Cluster) -> str:
    # This layout keeps all layers of a block contiguous, because short copies do not saturate a GPU's bus.
    # CPUs support only one layout.
    layout = {"lmcache.kv_cache_layout": "BLHNC"} if cluster.engine.gpu.count else {}
    config = {
        "kv_connector": "LMCacheClusterConnector",
        "kv_connector_module_path": "lmcache.engines.vllm.connector",
        "kv_role": "kv_both",
        # A chunk that fails to load is recomputed, and its request does not fail.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "lmcache.socket": SOCKET_PATH,
            "lmcache.chunk_tokens": cluster.spec.sidecar.chunk_tokens,
            **layout,
        },
    }
    return json.dumps(config, sort_keys=True, separators=(",", ":"))
