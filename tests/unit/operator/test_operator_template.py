"""Pod settings of the user, from podTemplate and from fields of spec.engine: merging, and refusals."""

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_operator.errors import InvalidSpecError
from tests.harness.operator.render import container, env_of, part, pod_of
from tests.harness.scope import examples

SMALL = {"limits": {"memory": "1Mi"}}


def pod(spec: Any) -> dict[str, Any]:
    return {"engine": {"podTemplate": {"spec": spec}}}


def sidecar_env(name: str) -> dict[str, Any]:
    return pod({"initContainers": [{"name": "sidecar", "env": [{"name": name, "value": "x"}]}]})


def template(**engine: Any) -> dict[str, Any]:
    return pod({"containers": [{"name": "engine", **engine}]})


TOKEN = {"sidecar": {"httpAuthentication": "Token"}}
KEYS = {"external": {"url": "redis://kv:6379"}, "encryption": {"secretRef": {"name": "keys"}}}
REMOTE_KEYS, TOKENS = "LMCACHE_REMOTE_ENCRYPTION_KEYS_DIR", "LMCACHE_HTTP_TOKENS_DIR"
ENCRYPTED = {"tiers": {"remote": KEYS}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (template(command=["sh"]), "spec.containers[engine].command"),
        (template(args=["x"]), "spec.containers[engine].args"),
        (template(env=[{"name": "PYTHONHASHSEED", "value": "1"}]), "env[PYTHONHASHSEED].value"),
        (template(image="x"), "spec.containers[engine].image"),
        (template(volumeMounts=[{"mountPath": "/run/lmcache", "name": "x"}]), "[/run/lmcache].name"),
        (pod({"volumes": [{"name": "arena", "emptyDir": None}]}), "volumes[arena]"),
        (pod({"initContainers": None}), "spec.initContainers"),
        (pod({"initContainers": [{"name": "sidecar", "resources": SMALL}]}), "resources.limits.memory"),
        *(
            (sidecar_env(name), f"sets {name} of the container sidecar: it is set by")
            for name in ("LMCACHE_TENANTS_FILE", "LMCACHE_DISK_ENCRYPTION_KEYS_DIR")
        ),
        (sidecar_env(REMOTE_KEYS) | ENCRYPTED, f"sets {REMOTE_KEYS} of the container sidecar: it is set by"),
        (sidecar_env(TOKENS) | TOKEN, f"sets {TOKENS} of the container sidecar"),
        (sidecar_env("LMCACHE_MEMORY_RETAIN_PERCENT"), "it is set by spec.tiers.memory.retainPercent"),
        (sidecar_env("LMCACHE_MEMORY_MAX_TTL_SECONDS"), "it is set by spec.tiers.memory.maxTtlSeconds"),
        (sidecar_env("LMCACHE_ADMIT"), "sets LMCACHE_ADMIT of the container sidecar: it is set"),
        (sidecar_env("LMCACHE_SOCKET"), "so that engine, sidecar and operator find each other"),
        (sidecar_env("LMCACHE_DISK_SIZE"), "it is set by spec.tiers.disk"),
        (template(env=[{"name": "VLLM_DP_SIZE", "value": "2"}]), "set only spec.engine.nodes"),
        (template(resources={"limits": {"nvidia.com/gpu": 2}}), "resources.limits.nvidia.com/gpu"),
        (template(resources={"limits": None}), "resources.limits"),
        (pod("x"), "spec"),
        (pod({"containers": [{"name": ["engine"]}]}), "spec.containers"),
        ({"engine": {"podTemplate": {"metadata": {"labels": {"lmcache.io/cluster": "x"}}}}}, "labels"),
        ({"engine": {"podTemplate": {"metadata": {"labels": {"lmcache.io/peers": "x"}}}}}, "tiers.peers"),
        ({"engine": {"podTemplate": {"metadata": {"labels": {"lmcache.io/group": "0"}}}}}, "engine.nodes"),
    ],
)  # fmt: skip
def test_pod_template_that_breaks_the_cache_is_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        pod_of(**changes)
    assert caught.value.path == "spec.engine.podTemplate"
    assert expected in str(caught.value)


keys = st.sampled_from(
    ["metadata", "labels", "spec", "containers", "initContainers", "volumes", "env", "name"]
)
garbage = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["engine", "sidecar", "arena"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(50))
@given(st.dictionaries(keys, garbage, max_size=2), st.dictionaries(keys, garbage, max_size=3))
def test_random_pod_template_is_merged_or_refused(template: dict[str, Any], spec: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidSpecError):
        pod_of(engine={"podTemplate": {"spec": spec, **template}})


def test_pod_template_can_set_the_sidecars_log_level() -> None:
    env = env_of(container(pod_of(**sidecar_env("LMCACHE_LOG_LEVEL")), "sidecar"))
    assert env["LMCACHE_LOG_LEVEL"] == "x"


def test_pod_template_can_change_other_fields() -> None:
    overlay = {
        "containers": [
            {"name": "engine", "resources": {"limits": {"cpu": "8"}}}, {"name": "logger", "image": "logger:1"}
        ],
        "tolerations": [{"key": "gpu", "operator": "Exists"}], "securityContext": {"fsGroup": 3000},
        "volumes": [{"name": "scratch", "emptyDir": {}}, {"name": "shm", "emptyDir": {"sizeLimit": "32Gi"}}],
    }  # fmt: skip
    spec = pod_of(**pod(overlay))
    assert spec["containers"][0]["resources"]["limits"] == {"cpu": "8", "nvidia.com/gpu": "1"}
    assert [each["name"] for each in spec["containers"]] == ["engine", "logger"]
    assert (spec["securityContext"]["fsGroup"], spec["securityContext"]["runAsUser"]) == (3000, 2000)
    assert part(spec["volumes"], "shm")["emptyDir"] == {"medium": "Memory", "sizeLimit": "32Gi"}


# -- fields of spec.engine with the names of pod fields


def test_fields_of_engine_and_pod_template_are_merged() -> None:
    """Equal values in both are no contradiction. A golden file has all fields of the engine."""
    engine = {"resources": {"requests": {"cpu": "8", "memory": "48Gi"}, "limits": {"memory": "64Gi"}}}
    overlay = template(resources={"limits": {"cpu": "16"}, "requests": {"memory": "48Gi"}})["engine"]
    resources = pod_of(engine=engine | overlay)["containers"][0]["resources"]
    assert (resources["limits"]["cpu"], resources["requests"]["cpu"]) == ("16", "8")


def test_limit_replaces_the_default_request_in_both_places() -> None:
    resources = {"limits": {"cpu": "500m", "memory": "2Gi"}}
    spec = pod_of(engine={"resources": resources})
    assert spec == pod_of(**template(resources=resources))
    assert spec["containers"][0]["resources"]["requests"] == {}
    assert container(spec, "sidecar")["resources"] == container(pod_of(), "sidecar")["resources"]


def test_variable_with_an_empty_value_may_have_a_source() -> None:
    """Kubernetes accepts it, and uses the source."""
    variable = {"name": "POD", "value": "", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    assert variable in pod_of(engine={"env": [variable]})["containers"][0]["env"]


def with_pod(engine: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return engine | pod(spec)["engine"]


SMALL_VOLUME = {"name": "shm", "emptyDir": {"sizeLimit": "2Gi"}}
ENV, TEMPLATE = "changes spec.containers[engine].env[", "podTemplate"
CONTRADICTIONS = [
    ({"env": [{"name": "PYTHONHASHSEED", "value": "1"}]}, "env", ENV),
    ({"env": [{"name": "VLLM_DP_RANK", "value": "1"}]}, "env", "sets VLLM_DP_RANK of the container"),
    ({"nodes": 2, "parallelism": {"data": 2}, "env": [{"name": "VLLM_HOST_IP", "value": "10.0.0.1"}]}, "env",
     "sets VLLM_HOST_IP of the container engine, which comes from a field of the pod"),
    ({"resources": {"limits": {"nvidia.com/gpu": "4"}}}, "resources", "limits.nvidia.com/gpu"),
    *(
        (with_pod({"nodes": 2, "parallelism": {"data": 2}}, containers=[{"name": "engine", probe: None}]),
         TEMPLATE, f"removes {probe} of the container engine: with engine.nodes, readiness does not")
        for probe in ("livenessProbe", "startupProbe")
    ),
    (with_pod({"priorityClassName": "a"}, priorityClassName="b"), TEMPLATE,
     "contradicts spec.engine.priorityClassName at spec.priorityClassName: set it in only one"),
    (with_pod({"tolerations": [{"key": "a"}]}, tolerations=[{"key": "b"}]), TEMPLATE,
     "contradicts spec.engine.tolerations"),
    (with_pod({"sharedMemorySize": "1Gi"}, volumes=[SMALL_VOLUME]), TEMPLATE,
     "spec.engine.sharedMemorySize at spec.volumes[shm].emptyDir.sizeLimit"),
    ({"sharedMemorySize": "1Mi"}, "sharedMemorySize", "between 64Mi and 16Ti"),
    ({"tolerations": {}}, "tolerations", "must be a list"),
    ({"tolerations": ["x"]}, "tolerations[0]", "must be an object"),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "path", "sentence"), CONTRADICTIONS)
def test_invalid_or_contradictory_engine_fields_are_refused(engine, path, sentence):
    with pytest.raises(InvalidSpecError) as caught:
        pod_of(engine=engine)
    assert caught.value.path == f"spec.engine.{path}"
    assert sentence in str(caught.value)


def test_model_volume_has_a_fixed_name() -> None:
    model = {"name": "m", "volume": {"name": "foo", "hostPath": {"path": "/m"}}}
    assert {"name": "models", "hostPath": {"path": "/m"}} in pod_of(model=model)["volumes"]
