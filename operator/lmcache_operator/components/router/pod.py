"""The pod of a router, which runs ``vllm-router``. Pure."""

from __future__ import annotations

from lmcache_operator.api.parse import Cluster
from lmcache_operator.api.router import KV_AWARE, Router
from lmcache_operator.components.engine.kinds import kind_of
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs import names, stateful
from lmcache_operator.specs.merge import merge
from lmcache_operator.specs.objects import PodContainer, PodTemplate, Resources

_UID = 65532
_DRAIN_SECONDS = 120
"""Time for a stopping router to finish the requests that it has forwarded."""
_NOTICE_SECONDS = 5
_POLICY = {
    "KVAware": "kv_aware",
    "CacheAware": "cache_aware",
    "RoundRobin": "round_robin",
    "PowerOfTwo": "power_of_two",
    "ConsistentHash": "consistent_hash",
}
"""Names of policies on the router's command line."""
_SET_BY = "it is set by spec.router.{}"
_FINDS_PODS = "the router finds its engines by their labels"
_PORTS = "the Service and the probes expect the operator's ports"
_EVENTS = "engines report the sources of their KV events themselves"
_HAND_OVER = "sidecars hand KV over by themselves"
_POOLS = "the operator sets it if spec.engine.prefill is set"
WITH_PREFILL = "--vllm-pd-disaggregation"
"""Option of a router that sends each request to a prefill pod first."""
_RESERVED = {
    "--policy": _SET_BY.format("policy"),
    **dict.fromkeys(("--host", "--port", "--prometheus-host", "--prometheus-port"), _PORTS),
    **dict.fromkeys(
        ("--worker-urls", "--service-discovery", "--selector", "--service-discovery-port",
         "--service-discovery-namespace", "--vllm-discovery-address", "--prefill", "--decode"),
        _FINDS_PODS,
    ),
    **dict.fromkeys(
        ("--kv-event-source", "--kv-event-replay-source", "--kv-event-block-size", "--kv-event-model",
         "--pd-kv-events"),
        _EVENTS,
    ),
    **dict.fromkeys((WITH_PREFILL, "--prefill-selector", "--decode-selector"), _POOLS),
    "--kv-connector": _HAND_OVER,
    "--mini-lb": "it would replace the router by one for tests",
}  # fmt: skip
"""Reasons why the user may not set an option of the router."""
_FAST_CHECKS = ("--health-check-interval-secs=2", "--health-failure-threshold=1")
"""With two pools, the router does not repeat a failed request on another pod. By default, it would notice a
dead pod only after minutes."""


def pod_template(cluster: Cluster, router: Router, image: str) -> PodTemplate:
    """The pod template of the Deployment.

    Raises:
        InvalidSpecError: an argument of the user is reserved, or the router cannot reach the engines.
    """
    spec = stateful.pod_spec(
        cluster,
        names.ROUTER,
        affinity=stateful.spread_over_nodes(names.selector(cluster.name, names.ROUTER)),
        # The router lists and watches the pods of its namespace.
        automountServiceAccountToken=True,
        containers=[_container(cluster, router, image)],
        securityContext=stateful.pod_security(cluster, _UID),
        terminationGracePeriodSeconds=_DRAIN_SECONDS,
    )
    return {"metadata": {"labels": names.labels(cluster, names.ROUTER)}, "spec": spec}


def _container(cluster: Cluster, router: Router, image: str) -> PodContainer:
    resources: Resources = {"limits": {"memory": "2Gi"}, "requests": {"cpu": "500m", "memory": "512Mi"}}
    return {
        "args": _args(cluster, router),
        "image": image,
        # Service proxies may send requests for a few seconds after the pod began to terminate.
        "lifecycle": {"preStop": {"sleep": {"seconds": _NOTICE_SECONDS}}},
        "livenessProbe": stateful.http_probe("/liveness", names.ROUTER_PORT, period=10, failures=6),
        "name": names.ROUTER,
        "ports": [
            {"containerPort": names.ROUTER_PORT, "name": "http", "protocol": "TCP"},
            {"containerPort": names.ROUTER_METRICS_PORT, "name": "metrics", "protocol": "TCP"},
        ],
        # A router is ready while it knows a healthy engine.
        "readinessProbe": stateful.http_probe("/readiness", names.ROUTER_PORT, period=5, failures=3),
        "resources": merge(resources, router.resources),
        "securityContext": stateful.READ_ONLY_SECURITY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _args(cluster: Cluster, router: Router) -> list[str]:
    for index, arg in enumerate(router.args):
        option = arg.partition("=")[0].replace("_", "-")
        # Python's parser takes any unambiguous beginning of an option.
        reserved = next((name for name in _RESERVED if len(option) > 2 and name.startswith(option)), None)
        if reserved is not None:
            raise InvalidSpecError(
                f"spec.router.args[{index}]", f"{option} can't be set: {_RESERVED[reserved]}"
            )
    kind, prefill = kind_of(cluster), cluster.engine.prefill
    if kind.option([*cluster.engine.args, *(prefill.args if prefill else [])], kind.certificate) is not None:
        message = "the router reaches engines by plain HTTP: remove --ssl-certfile from their args"
        raise InvalidSpecError("spec.router", message)
    if router.policy == KV_AWARE and cluster.platform.primary_host == "::":
        message = "the router can't read KV events by IPv6, the primary family of pods: use CacheAware"
        raise InvalidSpecError("spec.router.policy", message)
    options = {
        "host": cluster.platform.host,
        "policy": _POLICY[router.policy],
        "port": names.ROUTER_PORT,
        "prometheus-host": cluster.platform.host,
        "prometheus-port": names.ROUTER_METRICS_PORT,
        "service-discovery-namespace": cluster.namespace,
        "service-discovery-port": names.ENGINE_PORT,
    }
    return [
        *(f"--{name}={value}" for name, value in options.items()),
        "--service-discovery",
        *_pools(cluster),
        *router.args,
    ]


def _pools(cluster: Cluster) -> list[str]:
    """The selectors of engine pods. With two pools, each request goes to a prefill pod first."""

    def texts(labels: dict[str, str]) -> list[str]:
        return [f"{key}={value}" for key, value in labels.items()]

    engines = texts(stateful.serving_pods(cluster))
    if cluster.engine.prefill is None:
        return ["--selector", *engines]
    prefill = names.selector(names.object_name(cluster.name, names.PREFILL), names.ENGINE)
    return [
        WITH_PREFILL,
        "--prefill-selector", *texts(prefill),
        "--decode-selector", *engines,
        *_FAST_CHECKS,
    ]  # fmt: skip
