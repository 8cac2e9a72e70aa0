"""vLLM: the command line of ``vllm serve``, and the check of the user's arguments in it. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from lmcache_operator.api.parse import Cluster
from lmcache_operator.api.types import VLLM as VLLM_NAME
from lmcache_operator.components.engine.kinds.base import (
    ALL_ADDRESSES,
    NO_CACHE,
    NO_FILE,
    NO_SPLIT,
    ON_A_PORT,
    ONE_INJECTED_POD,
    ONE_POD,
    EngineKind,
    option_name,
)
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs.names import ENGINE_PORT, EVENTS_PORT
from lmcache_operator.specs.paths import SOCKET_PATH

_CONFIG, _HASH_ALGORITHM = "--kv-transfer-config", "--prefix-caching-hash-algo"
_EXECUTOR, _BLOCK, _SHUTDOWN = "--distributed-executor-backend", "--block-size", "--shutdown-timeout"
_GPU_SHARE, _KV_BYTES = "--gpu-memory-utilization", "--kv-cache-memory-bytes"
_SHARE_WITH_READER = "0.9"
"""vLLM's default is 0.92. The sidecar's reader takes about 0.5 GiB, which is 2 % of a GPU with 24 GiB."""
_EVENTS = "--kv-events-config"
_EVENTS_CONFIG = json.dumps(
    {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{EVENTS_PORT}", "publisher": "zmq"},
    sort_keys=True,
    separators=(",", ":"),
)
_DISCOVERY = "lmcache_client.vllm.router_discovery.RouterDiscovery"
"""Middleware that answers the router's questions about KV events."""
_TENANT_HEADER = "lmcache_client.vllm.tenant_header.TenantHeader"
"""Middleware that makes the gateway's header X-LMCache-Tenant the salt of a request."""
_ROUTED_TENANT_HEADER = "lmcache_client.vllm.tenant_header.RoutedTenantHeader"
"""The same, which refuses requests whose header vLLM's router drops."""
_RESERVED = {
    "--host": ALL_ADDRESSES,
    "--port": f"the Services expect the engine on port {ENGINE_PORT}",
    "--uds": ON_A_PORT,
    "--grpc": ON_A_PORT,
    "--headless": ON_A_PORT,
    "--ssl-cert-reqs": "the kubelet's probes have no certificate",
    "--config": NO_FILE,
    _HASH_ALGORITHM: "chunk keys must be the same in every pod",
    "--no-enable-prefix-caching": "the keys of cached chunks are made of the engine's own block hashes",
    "--enable-sleep-mode": f"it takes KV away under copies, and {NO_CACHE}",
    "--decode-context-parallel-size": NO_CACHE,
    "-dcp": NO_CACHE,
    _CONFIG: f"it loads LMCache, and no other connector can run next to it; {NO_SPLIT}",
    "--ec-transfer-config": NO_SPLIT,
    "--kv-offloading-size": "it would replace LMCache as the engine's KV connector",
    "--model": "it is set by spec.model.name",
    "--revision": "it is set by spec.model.revision",
    "--tensor-parallel-size": "it is set by spec.engine.parallelism.tensor",
    "--pipeline-parallel-size": "it is set by spec.engine.parallelism.pipeline",
    **dict.fromkeys(("--prefill-context-parallel-size", "-pcp", "--data-parallel-size"), ONE_POD),
    **dict.fromkeys(("--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port"), ONE_POD),
    "--": "what follows it would be taken for a second model",
}

_RESERVED_BY_INJECTION = {
    **{
        option: _RESERVED[option]
        for option in ("--", "--config", "--decode-context-parallel-size", "-dcp", "--ec-transfer-config",
                       "--enable-sleep-mode", "--kv-offloading-size", "--no-enable-prefix-caching", _CONFIG,
                       _HASH_ALGORITHM)
    },
    **dict.fromkeys(("--data-parallel-size", "--prefill-context-parallel-size", "-pcp"), ONE_INJECTED_POD),
    **dict.fromkeys(("--headless", "--nnodes", "-n", "--node-rank", "-r"), ONE_INJECTED_POD),
}  # fmt: skip
# Block hashes must be equal in every process, or no pod could load KV that another pod stored.
_VARIABLES = {"PYTHONHASHSEED": "0"}


class VLLM(EngineKind):
    """Pods that run ``vllm serve`` with the KV connector of LMCache."""

    name = VLLM_NAME
    command = ("vllm", "serve")
    variables = _VARIABLES
    reserved = _RESERVED
    reserved_by_injection = _RESERVED_BY_INJECTION
    read = (
        *_RESERVED, _EXECUTOR, _BLOCK, _EVENTS, _GPU_SHARE, _KV_BYTES, _SHUTDOWN, "--served-model-name",
        EngineKind.certificate,
    )  # fmt: skip
    stray_word = "the engine would take it for a second model"
    default_port = 8000
    health_seconds = 5
    can_share_gpus = True
    launcher = re.compile(r"(^|\n)((.*bin/)?vllm|vllm\.entrypoints\..*)(\n|$)")
    shell_line = re.compile(r"\bvllm serve\b")
    # The images of vLLM's router must not match.
    image = re.compile(r"(.*/)?vllm(-(openai|cpu|cuda|rocm|tpu|xpu|hpu|neuron|ascend|dev)[^/:@]*)?([:@].*)?")

    def flag_of(self, arg: str) -> str:
        """The option that an argument sets, without value and sub-options."""
        name = re.split("[=.]", arg, maxsplit=1)[0]
        if name.startswith(("--data-parallel", "--data_parallel", "-dp")):
            return "--data-parallel-size"
        if re.fullmatch("-[nr][0-9]+", name):
            return name[:2]  # -n2 is -n 2
        return super().flag_of(name)

    def shutdown_seconds(self, args: Sequence[str]) -> int | None:
        """Value of ``--shutdown-timeout``."""
        return self.int_option(args, _SHUTDOWN)

    def cache_args(self, cluster: Cluster) -> list[str]:
        """The KV connector, and hashes that are equal in all pods."""
        return [f"{_CONFIG}={_kv_transfer_config(cluster)}", f"{_HASH_ALGORITHM}=sha256_cbor"]

    def args(self, cluster: Cluster, shutdown_seconds: int, has_reader: bool = False) -> list[str]:
        """The model, the operator's arguments by name, then the user's in their order."""
        parallelism, model, user_args = cluster.engine.parallelism, cluster.model, cluster.engine.args
        flags = self._checked(user_args, cluster.spec.sidecar.chunk_tokens)
        options: dict[str, str | int] = {
            "--pipeline-parallel-size": parallelism.pipeline,
            "--port": ENGINE_PORT,
            "--tensor-parallel-size": parallelism.tensor,
        }
        if model.revision is not None:
            options["--revision"] = model.revision
        if "--served-model-name" not in flags:
            options["--served-model-name"] = model.name
        if _SHUTDOWN not in flags:
            options[_SHUTDOWN] = shutdown_seconds
        if has_reader and _GPU_SHARE not in flags and _KV_BYTES not in flags:
            options[_GPU_SHARE] = _SHARE_WITH_READER
        rendered = [*self.cache_args(cluster), *(f"{name}={value}" for name, value in options.items())]
        _check_events(cluster, flags)
        if cluster.events_reader:
            rendered += [f"{_EVENTS}={_EVENTS_CONFIG}", f"--middleware={_DISCOVERY}"]
        if _has_tenant_header(cluster):
            is_routed = cluster.spec.router is not None
            rendered.append(f"--middleware={_ROUTED_TENANT_HEADER if is_routed else _TENANT_HEADER}")
        return [model.name, *sorted(rendered, key=option_name), *user_args]

    def variables_of(self, cluster: Cluster) -> dict[str, str]:
        """See EngineKind. The server in Rust would ignore the middleware that sets salts."""
        return {**self.variables, **({"VLLM_USE_RUST_FRONTEND": "0"} if _has_tenant_header(cluster) else {})}

    def _checked(self, args: Sequence[str], chunk_tokens: int) -> list[str]:
        """The option that each argument sets. Raises InvalidSpecError for one that breaks the cache."""
        flags = self.checked_flags(args)
        if (executor := self.option(args, _EXECUTOR)) in ("ray", "external_launcher"):
            path = f"spec.engine.args[{flags.index(_EXECUTOR)}]"
            raise InvalidSpecError(path, f"{_EXECUTOR} can't be {executor}: {ONE_POD}")
        block = self.int_option(args, _BLOCK)
        if block is not None and (block == 0 or chunk_tokens % block):
            path = f"spec.engine.args[{flags.index(_BLOCK)}]"
            message = f"spec.sidecar.chunkTokens ({chunk_tokens}) must be a multiple of the block size"
            raise InvalidSpecError(path, message)
        return flags


def _has_tenant_header(cluster: Cluster) -> bool:
    return cluster.spec.tenants is not None and cluster.spec.tenants.header


def _check_events(cluster: Cluster, flags: Sequence[str]) -> None:
    """Raise InvalidSpecError if KV events would not reach the router, or would publish salts of tenants."""
    why = "the router needs its own events" if cluster.events_reader else ""
    if cluster.spec.tenants is not None:
        why = "KV events contain the salts of tenants in clear text. Remove the option, or spec.tenants"
    if why and _EVENTS in flags:
        path = f"spec.engine.args[{flags.index(_EVENTS)}]"
        raise InvalidSpecError(path, f"{_EVENTS} can't be set: {why}")


def _kv_transfer_config(cluster: Cluster) -> str:
    # This layout keeps all layers of a block contiguous, because short copies do not saturate a GPU's bus.
    # CPUs support only one layout.
    layout = {"lmcache.kv_cache_layout": "BLHNC"} if cluster.engine.gpu.count else {}
    config = {
        "kv_connector": "LMCacheClusterConnector",
        "kv_connector_module_path": "lmcache_client.vllm.connector",
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
