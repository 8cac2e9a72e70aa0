"""vLLM: the command line of ``vllm serve``, and the check of the user's arguments in it. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmcache_operator.api import engine_kinds
from lmcache_operator.api.blend import connector_settings
from lmcache_operator.api.parse import Cluster
from lmcache_operator.components.engine.kinds import base
from lmcache_operator.specs import Object
from lmcache_operator.specs.names import ENGINE_PORT, EVENTS_PORT
from lmcache_operator.specs.paths import SOCKET_PATH
from lmcache_store.common.text import plain

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
DISCOVERY = "--middleware=lmcache_client.vllm.router_discovery.RouterDiscovery"
"""Middleware that answers the router's questions about KV events, and lets vLLM tokenize prompts for it."""
_HINTS_ROUTE = "--middleware=lmcache_client.vllm.hints_route.HintsRoute"
"""Middleware that takes hints without a request. It reads the socket's path in LMCACHE_SOCKET."""
_TENANT_HEADER = "lmcache_client.vllm.tenant_header.TenantHeader"
"""Middleware that makes the gateway's header X-LMCache-Tenant the salt of a request."""
_ROUTED_TENANT_HEADER = "lmcache_client.vllm.tenant_header.RoutedTenantHeader"
"""The same, which refuses requests whose header vLLM's router drops."""
OLDEST, NEWEST = (tuple(map(int, version.split("."))) for version in engine_kinds.VLLM.versions.split("-"))
"""Oldest and newest supported version. A test compares them with the connector."""
_ALGORITHM = "sha256_cbor"
_NO_PREFIXES = "--no-enable-prefix-caching"
_WITHOUT_PREFIXES = "every prefix is loaded again, and models with recurrent states are not cached."
_METRIC = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'([a-z_]{1,64})="((?:[^"\\]|\\.){0,256})"')
_OTHER_RANKS = (
    "--data-parallel-address", "-dpa", "--data-parallel-external-lb", "-dpe", "--data-parallel-hybrid-lb",
    "-dph", "--data-parallel-multi-port-external-lb", "-dpm", "--data-parallel-rank", "-dpn", "-dpr", "-dpp",
    "--data-parallel-start-rank", "--data-parallel-size-local", "-dpl", "--data-parallel-rpc-port",
    "--data-parallel-supervisor-port",
)  # fmt: skip
"""Options that put ranks into other pods, or let another server choose the rank of a request."""
_RAY_RANKS = ("--data-parallel-backend", "-dpb")
_ELASTIC = ("--enable-elastic-ep", "--elastic-ep-max-dp-size")
_SET_DATA = "set only spec.engine.parallelism.data and spec.engine.nodes"
_RESERVED = {
    "--host": base.ALL_ADDRESSES,
    "--port": f"the Services expect the engine on port {ENGINE_PORT}",
    "--uds": base.ON_A_PORT,
    "--grpc": base.ON_A_PORT,
    "--headless": base.ON_A_PORT,
    "--ssl-cert-reqs": "the kubelet's probes have no certificate",
    "--config": base.NO_FILE,
    _HASH_ALGORITHM: "chunk keys must be the same in every pod",
    "--no-enable-prefix-caching": "the keys of cached chunks are made of the engine's own block hashes",
    "--enable-sleep-mode": f"it takes KV away under copies, and {base.NO_CACHE}",
    "--enable-return-routed-experts": f"loaded tokens have no experts, and {base.NO_CACHE}",
    "--decode-context-parallel-size": base.NO_CACHE,
    "-dcp": base.NO_CACHE,
    _CONFIG: f"it loads LMCache, and no other connector can run next to it; {base.NO_SPLIT}",
    "--ec-transfer-config": base.NO_SPLIT,
    "--kv-offloading-size": "it would replace LMCache as the engine's KV connector",
    "--model": "it is set by spec.model.name",
    "--revision": "it is set by spec.model.revision",
    **dict.fromkeys(("--tensor-parallel-size", "-tp"), "it is set by spec.engine.parallelism.tensor"),
    **dict.fromkeys(("--pipeline-parallel-size", "-pp"), "it is set by spec.engine.parallelism.pipeline"),
    **dict.fromkeys(("--data-parallel-size", "-dp"), "it is set by spec.engine.parallelism.data"),
    **dict.fromkeys(_OTHER_RANKS, f"the operator places the ranks: {_SET_DATA}"),
    **dict.fromkeys(_RAY_RANKS, f"Ray may start ranks in other pods: {_SET_DATA}"),
    **dict.fromkeys(_ELASTIC, "it changes the number of ranks while the engine runs"),
    **dict.fromkeys(("--prefill-context-parallel-size", "-pcp"), base.NO_CACHE),
    **dict.fromkeys(("--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port"), base.NODES),
    "--": "what follows it would be taken for a second model",
}

_RESERVED_BY_INJECTION = {
    **{
        option: _RESERVED[option]
        for option in ("--", "--config", "--decode-context-parallel-size", "-dcp", "--ec-transfer-config",
                       "--enable-return-routed-experts", "--enable-sleep-mode", "--kv-offloading-size",
                       "--no-enable-prefix-caching", _CONFIG, _HASH_ALGORITHM, *_ELASTIC)
    },
    **dict.fromkeys((*_OTHER_RANKS, *_RAY_RANKS, "--prefill-context-parallel-size", "-pcp", "--headless",
                     "--nnodes", "-n", "--node-rank", "-r"), base.ONE_INJECTED_POD),
}  # fmt: skip
# Block hashes must be equal in every process, or no pod could load KV that another pod stored.
_VARIABLES = {"PYTHONHASHSEED": "0"}


class VLLM(base.EngineKind):
    """Pods that run ``vllm serve`` with the KV connector of LMCache."""

    api = engine_kinds.VLLM
    command = ("vllm", "serve")
    variables = _VARIABLES
    reserved = _RESERVED
    reserved_by_injection = _RESERVED_BY_INJECTION
    reserved_annotation = "lmcache.io/reserved-args"
    read = (
        "-dc",  # vLLM's --diffusion-config, and no abbreviation of -dcp
        *_RESERVED, _EXECUTOR, _BLOCK, _EVENTS, _GPU_SHARE, _KV_BYTES, _SHUTDOWN, "--served-model-name",
        base.EngineKind.certificate,
    )  # fmt: skip
    stray_word = "the engine would take it for a second model"
    default_port = 8000
    health_seconds = 5
    can_share_gpus = True
    launcher = re.compile(r"(^|\n)((.*bin/)?vllm|vllm\.entrypoints\..*)(\n|$)")
    shell_commands = ("vllm serve",)
    pages = ("/version", "/metrics")
    # The images of vLLM's router must not match.
    image = re.compile(r"(.*/)?vllm(-(openai|cpu|cuda|rocm|tpu|xpu|hpu|neuron|ascend|dev)[^/:@]*)?([:@].*)?")

    def flag_of(self, arg: str) -> str:
        """The option that an argument sets, without value and sub-options."""
        name = re.split("[=.]", arg, maxsplit=1)[0]
        if re.match("-[nr][^a-z]", name):
            return name[:2]  # -n2 and -n+2 are -n 2
        return super().flag_of(name)

    def shutdown_seconds(self, args: Sequence[str]) -> int | None:
        """Value of ``--shutdown-timeout``."""
        return self.int_option(args, _SHUTDOWN)

    def cache_args(self, cluster: Cluster) -> list[str]:
        """The KV connector, and hashes that are equal in all pods."""
        return [f"{_CONFIG}={_kv_transfer_config(cluster)}", f"{_HASH_ALGORITHM}={_ALGORITHM}"]

    def args(self, cluster: Cluster, shutdown_seconds: int, has_reader: bool = False) -> list[str]:
        """The model, the operator's arguments by name, then the user's in their order."""
        parallelism, model, user_args = cluster.engine.parallelism, cluster.model, cluster.engine.args
        flags = self._checked(user_args, cluster.spec.sidecar.chunk_tokens)
        options: dict[str, str | int] = {
            "--pipeline-parallel-size": parallelism.pipeline,
            "--port": ENGINE_PORT,
            "--tensor-parallel-size": parallelism.tensor,
        }
        if parallelism.data > 1:
            # By default, vLLM starts an API server for each rank. These servers cut their answers on SIGTERM.
            options |= {"--api-server-count": 1, "--data-parallel-size": parallelism.data}
        if cluster.platform.host == "::":
            options["--host"] = "::"  # the default is all IPv4 addresses
        if model.revision is not None:
            options["--revision"] = model.revision
        if "--served-model-name" not in flags:
            options["--served-model-name"] = model.name
        if _SHUTDOWN not in flags:
            options[_SHUTDOWN] = shutdown_seconds
        if has_reader and _GPU_SHARE not in flags and _KV_BYTES not in flags:
            options[_GPU_SHARE] = _SHARE_WITH_READER
        rendered = [*self.cache_args(cluster), *(f"{name}={value}" for name, value in options.items())]
        rendered += ["--enable-expert-parallel"] * parallelism.expert
        _check_events(cluster, flags)
        if cluster.events_reader:
            rendered.append(f"{_EVENTS}={_EVENTS_CONFIG}")
        if cluster.events_reader or cluster.tokenizes_for_router:
            rendered.append(DISCOVERY)
        if cluster.engine.hints_route:
            rendered.append(_HINTS_ROUTE)
        if _has_tenant_header(cluster):
            # The last middleware is the first to get a request.
            is_routed = cluster.spec.router is not None
            rendered.append(f"--middleware={_ROUTED_TENANT_HEADER if is_routed else _TENANT_HEADER}")
        return [model.name, *sorted(rendered, key=base.option_name), *user_args]

    def variables_of(self, cluster: Cluster) -> dict[str, str]:
        """See EngineKind. The server in Rust would ignore the middlewares that users ask for."""
        needs_python = _has_tenant_header(cluster) or cluster.engine.hints_route
        return {**self.variables, **({"VLLM_USE_RUST_FRONTEND": "0"} if needs_python else {})}

    def read_pages(self, bodies: Sequence[bytes]) -> dict[str, Any]:
        """The version, and the labels of vLLM's metric about its cache."""
        known, metrics = base.object_of(bodies[0]) or {}, bodies[1]
        facts: dict[str, Any] = {"version": plain(known.get("version"))}
        if config := _METRIC.search(metrics.decode(errors="replace")):
            facts["cache"] = dict(_LABEL.findall(config[1]))
        return facts

    def argument_problems(self, container: Object, *, is_shared: bool) -> Iterator[base.KindProblem]:
        """The problems of the KV connector's options, and of keys that other pods cannot use."""
        words = base.words_of(container)
        if _NO_PREFIXES in map(self.flag_of, words):
            yield base.KindProblem(
                False, f"{_NO_PREFIXES} is set: {_WITHOUT_PREFIXES}", "Remove the argument."
            )
        config = self.option(words, _CONFIG)
        if config is None:
            return  # a shell or a file may set the options: /stats says whether the engine is attached
        parsed = base.object_of(config)
        if parsed is None:
            yield base.KindProblem(True, f"{_CONFIG} is not a JSON object.", "Correct the argument.")
        elif (policy := parsed.get("kv_load_failure_policy")) != "recompute":
            value = plain(policy) or "not set"
            text = f"kv_load_failure_policy is {value}, so a failed load may fail its request."
            yield base.KindProblem(False, text, f'Set "kv_load_failure_policy": "recompute" in {_CONFIG}.')
        if (algorithm := self.option(words, _HASH_ALGORITHM)) != _ALGORITHM:
            value = plain(algorithm) or "not set"
            text = f"{_HASH_ALGORITHM} is {value}, so keys are private to the engine."
            yield base.KindProblem(False, text, f"Set {_HASH_ALGORITHM} {_ALGORITHM}.")
        seed = next((each for each in container.get("env") or () if each["name"] == "PYTHONHASHSEED"), None)
        if (seed is None or seed.get("value") == "random") and not is_shared:
            text = "PYTHONHASHSEED is not set, so keys may be private to the engine."
            yield base.KindProblem(
                False, text, "Set the variable PYTHONHASHSEED=0 in the engine's container."
            )

    def supports(self, version: str) -> bool:
        """Whether the connector supports a version. Versions of another form may be builds of the user's."""
        number = re.match(r"v?(\d{1,9})\.(\d{1,9})", version)
        return not number or OLDEST <= (int(number[1]), int(number[2])) <= NEWEST

    def setting_problems(self, cache: Mapping[str, Any], chunk_tokens: int) -> Iterator[base.KindProblem]:
        """Problems of prefix caching and of the block size."""
        if cache.get("enable_prefix_caching") == "False":
            yield base.KindProblem(
                False, f"Prefix caching is off: {_WITHOUT_PREFIXES}", f"Remove {_NO_PREFIXES}."
            )
        block = plain(cache.get("block_size"))
        if block.isdecimal() and 0 < int(block) <= 1 << 20 and chunk_tokens % int(block):
            tokens = -(-chunk_tokens // int(block)) * int(block)
            text = f"spec.sidecar.chunkTokens {chunk_tokens} is no multiple of the engine's block of {block} "
            remedy = f"Set it to {tokens}, which the engine uses already."
            yield base.KindProblem(False, f"{text}tokens.", remedy)

    def settings(self, cache: Mapping[str, Any]) -> str:
        """The block size."""
        return f"Prefix caching is on. A block has {plain(cache.get('block_size'))} tokens."

    def _checked(self, args: Sequence[str], chunk_tokens: int) -> list[str]:
        """The option that each argument sets. Raises InvalidSpecError for one that breaks the cache."""
        flags = self.checked_flags(args)
        if (executor := self.option(args, _EXECUTOR)) in ("ray", "external_launcher"):
            raise base.refused(flags, _EXECUTOR, f"{_EXECUTOR} can't be {executor}: {base.NODES}")
        block = self.int_option(args, _BLOCK)
        if block is not None and (block == 0 or chunk_tokens % block):
            message = f"spec.sidecar.chunkTokens ({chunk_tokens}) must be a multiple of the block size"
            raise base.refused(flags, _BLOCK, message)
        return flags


def _has_tenant_header(cluster: Cluster) -> bool:
    return cluster.spec.tenants is not None and cluster.spec.tenants.header


def _check_events(cluster: Cluster, flags: Sequence[str]) -> None:
    """Raise InvalidSpecError if KV events would not reach the router, or would publish salts of tenants."""
    why = "the router needs its own events" if cluster.events_reader else ""
    if cluster.spec.tenants is not None:
        why = "KV events contain the salts of tenants in clear text. Remove the option, or spec.tenants"
    if why and _EVENTS in flags:
        raise base.refused(flags, _EVENTS, f"{_EVENTS} can't be set: {why}")


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
            **connector_settings(cluster.engine.blend),
        },
    }
    # The kubelet would replace "$$" and "$(NAME)" in an argument.
    return json.dumps(config, sort_keys=True, separators=(",", ":")).replace("$", "\\u0024")
