"""The router in the spec of an LMCacheCluster."""

from __future__ import annotations

import re
from typing import Any

from lmcache_operator.api.fields import Part, Rule, field
from lmcache_operator.api.keywords import ARGUMENTS, IMAGE_NAME

KV_AWARE, CACHE_AWARE = "KVAware", "CacheAware"
POLICIES = (KV_AWARE, CACHE_AWARE, "RoundRobin", "PowerOfTwo", "ConsistentHash")
_OPTION = "^--[a-z]"


class Router(Part):
    """vLLM's router: pods that send each request to the engine that has most of its KV."""

    policy: str = field(
        "Choice of the engine for a request. KVAware: the engine whose GPUs and memory tier have the longest "
        "prefix, as its KV events report, unless it is busy. CacheAware: the engine that got similar prompts "
        "before; with SGLang, for prompts of token ids only. RoundRobin, PowerOfTwo (the less busy of two) "
        "and ConsistentHash (by session or user) ignore the cache. A change to or from KVAware or CacheAware "
        "replaces pods of vLLM.",
        default=KV_AWARE,
        enum=[*POLICIES],
    )
    replicas: int = field(
        "Number of router pods. Each learns from the KV events by itself.", default=2, minimum=1, maximum=32
    )
    image: str | None = field(
        "Image with vllm-router 0.1.17. Default: the image of the operator's version.", **IMAGE_NAME
    )
    args: list[str] = field(
        "Additional arguments for vllm-router, each as --name=value. Arguments that the operator sets are "
        "refused.",
        default=[],
        **ARGUMENTS,
        rules=(
            Rule(
                f"self.all(a, a.matches('{_OPTION}'))",
                "router.args: write each argument as --name=value",
                lambda args: all(re.search(_OPTION, arg) for arg in args),
            ),
        ),
    )
    resources: dict[str, Any] = field(
        "CPU and memory of a router's container. Default: requests of 500m and 512Mi, and a limit of 2Gi.",
        default={},
        shape="Container.resources",
        rules=(
            Rule(None, "a router uses no devices: leave claims out", lambda given: "claims" not in given),
        ),
    )


class RouterStatus(Part):
    """The router."""

    pools: int | None = field(
        "Pools of engine pods that each request passes. 2: a prefill pod computes the prompt. It stays 2 "
        "until no router pod uses prefill pods any more."
    )
    replicas: int | None = field("Number of router pods.")
    ready_replicas: int | None = field("Router pods that are Ready.")
