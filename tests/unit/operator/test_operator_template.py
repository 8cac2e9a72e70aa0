"""Pod settings of the user, from podTemplate and from fields of spec.engine: merging, and refusals."""

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_operator.api.parse import parse
from lmcache_operator.components.base import Context
from lmcache_operator.components.engine.engine import Engine
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs.names import STOCK_IMAGES as IMAGES

from tests.harness.operator_model import cluster
from tests.harness.scope import examples


def pod_of(changes: dict[str, Any]) -> dict[str, Any]:
    rendered = Engine().render(parse(cluster(**changes)), Context(IMAGES))[-1]
    template: dict[str, Any] = rendered["spec"]["template"]
    return template


SMALL = {"limits": {"memory": "1Mi"}}


def pod(spec: Any) -> dict[str, Any]:
    return {"engine": {"podTemplate": {"spec": spec}}}


def sidecar_env(name: str) -> dict[str, Any]:
    return pod({"initContainers": [{"name": "sidecar", "env": [{"name": name, "value": "x"}]}]})


def template(**engine: Any) -> dict[str, Any]:
    return pod({"containers": [{"name": "engine", **engine}]})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (template(command=["sh"]), "spec.containers[engine].command"),
        (template(args=["x"]), "spec.containers[engine].args"),
        (template(env=[{"name": "PYTHONHASHSEED", "value": "1"}]), "env[PYTHONHASHSEED].value"),
        (template(image="x"), "spec.containers[engine].image"),
        (template(volumeMounts=[{"mountPath": "/run/lmcache", "name": "x"}]), "[/run/lmcache].name"),
        (
            template(volumeMounts=[{"mountPath": "/x", "name": "api-access"}])
            | {"sidecar": {"httpAuthentication": "TokenReview"}},
            "mounts the volume api-access, which only the sidecar may read",
        ),
        (pod({"volumes": [{"name": "arena", "emptyDir": None}]}), "volumes[arena]"),
        (pod({"initContainers": None}), "spec.initContainers"),
        (pod({"initContainers": [{"name": "sidecar", "resources": SMALL}]}), "resources.limits.memory"),
        (sidecar_env("LMCACHE_TENANTS_FILE"), "sets LMCACHE_TENANTS_FILE of the container sidecar"),
        (sidecar_env("LMCACHE_ADMIT"), "sets LMCACHE_ADMIT of the container sidecar: it is set"),
        (sidecar_env("LMCACHE_SOCKET"), "so that engine, sidecar and operator find each other"),
        (sidecar_env("LMCACHE_DISK_SIZE"), "it is set by spec.tiers.disk"),
        (template(env=[{"name": "VLLM_DP_SIZE", "value": "2"}]), "an engine is one pod"),
        (template(resources={"limits": {"nvidia.com/gpu": 2}}), "resources.limits.nvidia.com/gpu"),
        (template(resources={"limits": None}), "resources.limits"),
        (pod("x"), "spec"),
        (pod({"containers": [{"name": ["engine"]}]}), "spec.containers"),
        ({"engine": {"podTemplate": {"metadata": {"labels": {"lmcache.io/cluster": "x"}}}}}, "labels"),
        ({"engine": {"podTemplate": {"metadata": {"labels": {"lmcache.io/peers": "x"}}}}}, "tiers.peers"),
    ],
)  # fmt: skip
def test_pod_template_that_breaks_the_cache_is_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidSpecError) as caught:
        pod_of(changes)
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
        pod_of({"engine": {"podTemplate": {"spec": spec, **template}}})


def test_pod_template_can_set_the_sidecars_log_level() -> None:
    sidecar = pod_of(sidecar_env("LMCACHE_LOG_LEVEL"))["spec"]["initContainers"][0]
    assert {"name": "LMCACHE_LOG_LEVEL", "value": "x"} in sidecar["env"]


def test_pod_template_can_change_other_fields() -> None:
    extra = {"name": "logger", "image": "logger:1"}
    overlay = {
        "spec": {
            "containers": [{"name": "engine", "resources": {"limits": {"cpu": "8"}}}, extra],
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "securityContext": {"fsGroup": 3000},
            "volumes": [
                {"name": "scratch", "emptyDir": {}},
                {"name": "shm", "emptyDir": {"sizeLimit": "32Gi"}},
            ],
        }
    }
    spec = pod_of({"engine": {"podTemplate": overlay}})["spec"]
    assert spec["containers"][0]["resources"]["limits"] == {"cpu": "8", "nvidia.com/gpu": "1"}
    assert [c["name"] for c in spec["containers"]] == ["engine", "logger"]
    assert spec["securityContext"]["fsGroup"] == 3000
    assert spec["securityContext"]["runAsUser"] == 2000
    shm = next(volume for volume in spec["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "32Gi"}


# -- fields of spec.engine with the names of pod fields


SPREAD = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}


def test_engine_fields_are_rendered_like_the_pod_template() -> None:
    toleration = {"key": "gpu", "operator": "Exists"}
    engine = {
        "env": [{"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"}],
        "resources": {"requests": {"cpu": "8", "memory": "48Gi"}, "limits": {"memory": "64Gi"}},
        "sharedMemorySize": "32Gi",
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [toleration],
        "topologySpreadConstraints": [SPREAD, SPREAD | {"labelSelector": {}}],
        "priorityClassName": "serving",
    }
    spec = pod_of({"engine": engine})["spec"]
    container = spec["containers"][0]
    assert engine["env"][0] in container["env"]
    assert "PYTHONHASHSEED" in str(container["env"])
    assert container["resources"] == {
        "requests": {"cpu": "8", "memory": "48Gi"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": "1"},
    }
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "32Gi"}} in spec["volumes"]
    assert (spec["nodeSelector"], spec["priorityClassName"]) == ({"gpu": "h200"}, "serving")
    assert spec["tolerations"] == [toleration]
    first, second = spec["topologySpreadConstraints"]
    assert first["labelSelector"]["matchLabels"]["lmcache.io/cluster"] == "demo"
    assert second["labelSelector"] == {}
    # Equal values in podTemplate are no contradiction, and additional fields are merged.
    overlay = template(resources={"limits": {"cpu": "16"}, "requests": {"memory": "48Gi"}})["engine"]
    spec = pod_of({"engine": engine | overlay})["spec"]
    assert spec["containers"][0]["resources"]["limits"]["cpu"] == "16"
    assert "cpu" in spec["containers"][0]["resources"]["requests"]


def test_limit_replaces_the_default_request_in_both_places() -> None:
    resources = {"limits": {"cpu": "500m", "memory": "2Gi"}}
    spec = pod_of({"engine": {"resources": resources}})["spec"]
    assert spec == pod_of(template(resources=resources))["spec"]
    assert spec["containers"][0]["resources"]["requests"] == {}
    sidecar = spec["initContainers"][0]["resources"]
    assert sidecar == pod_of({})["spec"]["initContainers"][0]["resources"]


@pytest.mark.parametrize(
    ("engine", "path", "sentence"),
    [
        ({"env": [{"name": "PYTHONHASHSEED", "value": "1"}]}, "env", "changes spec.containers[engine].env["),
        ({"env": [{"name": "VLLM_DP_RANK", "value": "1"}]}, "env", "sets VLLM_DP_RANK of the container"),
        ({"resources": {"limits": {"nvidia.com/gpu": "4"}}}, "resources", "limits.nvidia.com/gpu"),
        (
            {"priorityClassName": "a", **pod({"priorityClassName": "b"})["engine"]},
            "podTemplate",
            "contradicts spec.engine.priorityClassName at spec.priorityClassName: set it in only one",
        ),
        (
            {"tolerations": [{"key": "a"}], **pod({"tolerations": [{"key": "b"}]})["engine"]},
            "podTemplate", "contradicts spec.engine.tolerations",
        ),
        (
            {
                "sharedMemorySize": "1Gi",
                **pod({"volumes": [{"name": "shm", "emptyDir": {"sizeLimit": "2Gi"}}]})["engine"],
            },
            "podTemplate", "spec.engine.sharedMemorySize at spec.volumes[shm].emptyDir.sizeLimit",
        ),
        ({"sharedMemorySize": "1Mi"}, "sharedMemorySize", "between 64Mi and 16Ti"),
        ({"tolerations": {}}, "tolerations", "must be a list"),
        ({"tolerations": ["x"]}, "tolerations[0]", "must be an object"),
    ],
)  # fmt: skip
def test_invalid_or_contradictory_engine_fields_are_refused(engine, path, sentence):
    with pytest.raises(InvalidSpecError) as caught:
        pod_of({"engine": engine})
    assert caught.value.path == f"spec.engine.{path}"
    assert sentence in str(caught.value)


def test_model_volume_has_a_fixed_name() -> None:
    changes = {"model": {"name": "m", "volume": {"name": "foo", "hostPath": {"path": "/m"}}}}
    volumes = pod_of(changes)["spec"]["volumes"]
    assert {"name": "models", "hostPath": {"path": "/m"}} in volumes
