"""SGLang: the command line of its server with HiCache, and the check of the user's arguments in it. Pure.

HiCache copies KV between the GPU and a pool in the engine's host memory. The storage backend of LMCache
copies whole pages between this pool and the sidecar. The pool is only a buffer (mode ``buffer_only``). The
sidecar needs no access to GPUs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmcache_operator.api.engine_kinds import SGLANG
from lmcache_operator.api.parse import Cluster
from lmcache_operator.components.engine.kinds import base
from lmcache_operator.specs import Object
from lmcache_operator.specs.names import ENGINE_PORT
from lmcache_operator.specs.paths import SOCKET_PATH
from lmcache_store.common.text import plain

PAGE_TOKENS = 64
"""Tokens of a page, which is also the unit of storage."""
_MIN_PAGE_TOKENS = 16
"""Tokens of the smallest page that the storage backend caches."""
HOST_POOL_RATIO = "1.05"
"""Size of the host pool, relative to the KV cache in the engine's GPUs. SGLang loads no prompt that is longer
than the pool. So this is the smallest pool that holds any prompt which the engine can hold."""
_BACKEND, _BACKEND_CONFIG = "--hicache-storage-backend", "--hicache-storage-backend-extra-config"
_NO_RADIX_CACHE = "--disable-radix-cache"
_PAGE, _RATIO = "--page-size", "--hicache-ratio"
_POLICY, _WRITES = "--hicache-storage-prefetch-policy", "--hicache-write-policy"
_LAYOUT, _IO = "--hicache-mem-layout", "--hicache-io-backend"
_HOST_MODE = "--hicache-host-memory-mode"
_SETTINGS = ("disable_radix_cache", "enable_hierarchical_cache", "hicache_storage_backend", "page_size")
_OTHER_CACHE = "it would replace HiCache, which LMCache is a storage backend of"
_WHOLE_PAGES = "LMCache copies whole pages, which need the layout page_first_direct"
_NO_PREFIXES = "without the radix cache, the engine has no prefixes to store"
_ON_SEVERAL_NODES = (
    "--nnodes", "--node-rank", "--dist-init-addr", "--nccl-init-addr", "--use-ray", "--elastic-ep-backend",
)  # fmt: skip
_ATTENTION = ("--attn-dp-size", "--attention-data-parallel-size", "--enable-dp-attention", "--dwdp-size")
_WITHOUT_CACHE = {
    _BACKEND: "it loads LMCache, and HiCache has only one storage backend",
    _BACKEND_CONFIG: "it loads LMCache, and names the socket of the sidecar",
    _LAYOUT: _WHOLE_PAGES,
    _IO: _WHOLE_PAGES,
    "--enable-unified-memory": _WHOLE_PAGES,
    _NO_RADIX_CACHE: _NO_PREFIXES,
    "--prefill-only-disable-kv-cache": _NO_PREFIXES,
    **dict.fromkeys(
        ("--radix-cache-backend", "--enable-lmcache", "--enable-flexkv",
         "--enable-unified-cache-external-linker"),
        _OTHER_CACHE,
    ),
    **dict.fromkeys(
        ("--dcp-size", "--decode-context-parallel-size", "--enable-kv-cache-sharding",
         "--enable-dsa-cache-layer-split"),
        base.NO_CACHE,
    ),
    **dict.fromkeys(("--disaggregation-mode", "--encoder-only", "--language-only"), base.NO_SPLIT),
    "--config": base.NO_FILE,
    "--": "what follows it would not be read as options",
}  # fmt: skip
_RESERVED = {
    **_WITHOUT_CACHE,
    "--host": base.ALL_ADDRESSES,
    "--port": f"the Services expect the engine on port {ENGINE_PORT}",
    "--grpc-mode": base.ON_A_PORT,
    "--smg-grpc-mode": base.ON_A_PORT,
    **dict.fromkeys(("--model-path", "--model"), "it is set by spec.model.name"),
    "--revision": "it is set by spec.model.revision",
    **dict.fromkeys(("--tp-size", "--tensor-parallel-size"), "it is set by spec.engine.parallelism.tensor"),
    **dict.fromkeys(
        ("--pp-size", "--pipeline-parallel-size"), "it is set by spec.engine.parallelism.pipeline"
    ),
    **dict.fromkeys(("--dp-size", "--data-parallel-size"), "it is set by spec.engine.parallelism.data"),
    **dict.fromkeys((*_ON_SEVERAL_NODES, *_ATTENTION), base.ONE_POD),
}

_RESERVED_BY_INJECTION = _WITHOUT_CACHE | dict.fromkeys(
    ("--nnodes", "--node-rank", "--use-ray", "--elastic-ep-backend", *_ATTENTION), base.ONE_INJECTED_POD
)


class SGLang(base.EngineKind):
    """Pods that run SGLang's server with the storage backend of LMCache."""

    api = SGLANG
    command = ("python3", "-m", "sglang.launch_server")
    reserved = _RESERVED
    reserved_by_injection = _RESERVED_BY_INJECTION
    reserved_annotation = "lmcache.io/reserved-sglang-args"
    read = (
        *_RESERVED, _PAGE, _RATIO, _HOST_MODE, _POLICY, _WRITES, "--served-model-name",
        base.EngineKind.certificate,
    )  # fmt: skip
    stray_word = "the engine would not start"
    default_port = 30000
    # /health waits for the next step of the scheduler. After 20 s, SGLang itself reports a failure.
    health_seconds = 25
    can_share_gpus = False
    launcher = re.compile(r"(^|\n)((.*bin/)?sglang\nserve|sglang\.launch_server)(\n|$)")
    shell_commands = ("sglang serve", "sglang.launch_server")
    pages = ("/server_info",)
    # The images of SGLang's router must not match.
    image = re.compile(r"(.*/)?sglang(-(rocm|cpu|xpu|npu|daily|dev)[^/:@]*)?([:@].*)?")

    def cache_args(self, cluster: Cluster) -> list[str]:
        """HiCache with LMCache as its storage backend."""
        options = {
            _HOST_MODE: "buffer_only",
            _IO: "direct",
            _LAYOUT: "page_first_direct",
            _RATIO: HOST_POOL_RATIO,
            _BACKEND: "dynamic",
            _BACKEND_CONFIG: _backend_config(),
            # With "timeout", ranks vote on each waiting request. They hang if they disagree on which wait.
            _POLICY: "wait_complete",
            _WRITES: "write_through",
            _PAGE: PAGE_TOKENS,
        }
        return ["--enable-hierarchical-cache", *(f"{name}={value}" for name, value in options.items())]

    def args(self, cluster: Cluster, shutdown_seconds: int, has_reader: bool = False) -> list[str]:
        """The operator's arguments by name, then the user's in their order.

        SGLang finishes its requests without a limit of its own: the pod's grace period is the limit.
        """
        parallelism, model, user_args = cluster.engine.parallelism, cluster.model, cluster.engine.args
        flags = self.checked_flags(user_args)
        page = self.int_option(user_args, _PAGE)
        if page is not None and page < _MIN_PAGE_TOKENS:
            sentence = f"a page must have at least {_MIN_PAGE_TOKENS} tokens: {base.NO_CACHE}"
            raise base.refused(flags, _PAGE, sentence)
        options: dict[str, str | int] = {
            # SGLang cannot serve both families: its server takes "::" for IPv6 only.
            "--host": cluster.platform.primary_host,
            "--model-path": model.name,
            "--port": ENGINE_PORT,
            "--pp-size": parallelism.pipeline,
            "--served-model-name": model.name,
            "--tp-size": parallelism.tensor,
        }
        if parallelism.data > 1:
            options["--dp-size"] = parallelism.data
        if model.revision is not None:
            options["--revision"] = model.revision
        rendered = [*self.cache_args(cluster), "--enable-cache-report", "--enable-metrics"]
        rendered += [f"{name}={value}" for name, value in options.items()]
        return [
            *sorted((arg for arg in rendered if base.option_name(arg) not in flags), key=base.option_name),
            *user_args,
        ]

    def read_pages(self, bodies: Sequence[bytes]) -> dict[str, Any]:
        """The version, and the settings of the caches."""
        info = base.object_of(bodies[0]) or {}
        facts: dict[str, Any] = {"version": plain(info.get("version"))}
        if cache := {name: plain(str(info[name])) for name in _SETTINGS if name in info}:
            facts["cache"] = cache
        return facts

    def argument_problems(self, container: Object, *, is_shared: bool) -> Iterator[base.KindProblem]:
        """The problems of the options of HiCache."""
        words = base.words_of(container)
        if _NO_RADIX_CACHE in map(self.flag_of, words):
            text = f"{_NO_RADIX_CACHE} is set, so the engine has no prefixes to store."
            yield base.KindProblem(True, text, "Remove the argument.")
        config = self.option(words, _BACKEND_CONFIG)
        if config is None or config.startswith("@"):
            return  # a shell or a file may set the options: /stats says whether the engine is attached
        if (backend := self.option(words, _BACKEND)) != "dynamic":
            text = f"{_BACKEND} is {plain(backend) or 'not set'}, so the engine does not load LMCache."
            yield base.KindProblem(True, text, f"Set {_BACKEND} dynamic.")
        parsed = base.object_of(config)
        if parsed is None:
            yield base.KindProblem(True, f"{_BACKEND_CONFIG} is not a JSON object.", "Correct the argument.")
        elif parsed.get("interface_v1") != 1:
            value = plain(str(parsed.get("interface_v1", "not set")))
            text = f"interface_v1 is {value}, but LMCache needs 1."
            yield base.KindProblem(True, text, f'Set "interface_v1": 1 in {_BACKEND_CONFIG}.')

    def supports(self, version: str) -> bool:
        """Whether the storage backend supports a version."""
        return version.split("+")[0].split(".post")[0] == SGLANG.versions

    def setting_problems(self, cache: Mapping[str, Any], chunk_tokens: int) -> Iterator[base.KindProblem]:
        """A problem if HiCache is off."""
        if cache.get("disable_radix_cache") == "True" or cache.get("enable_hierarchical_cache") == "False":
            remedy = f"Set --enable-hierarchical-cache, and remove {_NO_RADIX_CACHE}."
            yield base.KindProblem(True, "HiCache is off, so the engine runs without LMCache.", remedy)

    def settings(self, cache: Mapping[str, Any]) -> str:
        """The page size."""
        return f"HiCache is on. A page has {plain(cache.get('page_size'))} tokens."


def _backend_config() -> str:
    config = {
        "backend_name": "lmcache",
        "module_path": "lmcache_client.sglang.backend",
        "class_name": "LMCacheBackend",
        "interface_v1": 1,
        # Look up every prefix that is at least one page longer than what the engine has itself.
        "prefetch_threshold": PAGE_TOKENS,
        "hicache_storage_pass_prefix_keys": True,
        "lmcache.socket": SOCKET_PATH,
    }
    return json.dumps(config, sort_keys=True, separators=(",", ":"))
