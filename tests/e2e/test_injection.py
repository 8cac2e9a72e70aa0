"""A Deployment that existed before: with one label its pods get a cache, and hit."""

from __future__ import annotations

from lmcache_operator.components.injection.pods import OUTCOME, has_cache
from lmcache_operator.specs.names import INJECT_LABEL

from testing.kube.api import Object
from testing.kube.operator import CLUSTERS
from testing.node import app
from testing.node.pods import Pod
from tests.harness.pods import hit, prompt

SETTINGS = "settings"
DEPLOYMENTS = "apps/v1/deployments"
USER = 1234
"""User id of the engine's container. Neither image uses it."""


def deployment(cluster: Object) -> Object:
    """The user's Deployment: like the engine of an LMCacheCluster, but only the label refers to a cache."""
    engine, spec = cluster["spec"]["engine"], cluster["spec"]["engine"]["podTemplate"]["spec"]
    (container,) = spec["containers"]
    mounts = [{"name": "models", "mountPath": "/models"}, {"name": "shm", "mountPath": "/dev/shm"}]
    vllm = container | {
        "name": "vllm",
        "image": engine["image"],
        "command": ["vllm", "serve"],
        "args": ["/models", *engine["args"]],
        "env": [*container["env"], *({"name": name, "value": "/tmp"} for name in ("HOME", "USER"))],
        "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 2},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsUser": USER,
        },
        "volumeMounts": [*container["volumeMounts"], *mounts],
    }
    models, shm = cluster["spec"]["model"]["volume"], {"emptyDir": {"medium": "Memory"}}
    pod = {
        "containers": [vllm],
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "volumes": [*spec["volumes"], {"name": "models", **models}, {"name": "shm", **shm}],
    }
    template = {"metadata": {"labels": {"app": "llm", INJECT_LABEL: SETTINGS}}, "spec": pod}
    selector = {"matchLabels": {"app": "llm"}}
    return {"metadata": {"name": "llm"}, "spec": {"selector": selector, "template": template}}


def test_pods_of_a_labelled_deployment_hit(installed, references):
    node, cluster = installed, app.tiny_cluster(SETTINGS, references["engine"])
    deployment_object = deployment(cluster)
    cluster["spec"]["engine"] |= {"replicas": 0}
    node.api.apply(CLUSTERS, cluster, app.NAMESPACE)
    template = deployment_object["spec"]["template"]
    trial = {**template, "metadata": template["metadata"] | {"name": "tried"}}
    # The API server reads LMCacheProfiles by a watch.
    path = f"{node.api.path('v1/pods', app.NAMESPACE)}?dryRun=All"
    node.wait(lambda: has_cache(node.api.request("POST", path, trial)), 60)
    node.api.create(DEPLOYMENTS, deployment_object, app.NAMESPACE)

    def ready() -> Pod | None:
        pods = [Pod(node, obj) for obj in node.api.objects("v1/pods", app.NAMESPACE, "app=llm")]
        return next((pod for pod in pods if pod.is_ready), None)

    try:
        pod = node.wait(ready, app.READY_SECONDS)
        assert pod.object["metadata"]["annotations"][OUTCOME] == "injected"
        # This prompt is unique: pods of all clusters with this model share rows in Redis.
        question = prompt(50)
        cold = pod.complete(question)
        assert cold.num_cached == 0
        hit(pod, question, cold)
        assert pod.stats()["memory"]["hits"] > 0
    finally:
        node.api.delete(DEPLOYMENTS, "llm", app.NAMESPACE)
        node.api.delete(CLUSTERS, SETTINGS, app.NAMESPACE)
        node.wait(lambda: not node.api.objects("v1/pods", app.NAMESPACE, "app=llm"), 180)
