"""A Deployment that existed before: with one label its pods get a cache, and hit."""

from lmcache_operator.components.injection.pods import OUTCOME
from testing.kube.operator import CLUSTERS
from testing.node import app
from tests.harness.operator.injected import InjectedPods
from tests.harness.operator.pods import hit, prompt

SETTINGS = "settings"


def test_pods_of_a_labelled_deployment_hit(installed, references):
    node, cluster = installed, app.tiny_cluster(SETTINGS, references["engine"])
    engine = {"name": "vllm", "command": ["vllm", "serve"], "args": ["/models", *app.ENGINE_ARGS]}
    deployment = InjectedPods(node, "llm", cluster, engine)
    cluster["spec"]["engine"] |= {"replicas": 0}
    node.api.apply(CLUSTERS, cluster, app.NAMESPACE)
    deployment.create()
    try:
        pod = deployment.ready_pod()
        assert pod.object["metadata"]["annotations"][OUTCOME] == "injected"
        # This prompt is unique: pods of all clusters with this model share rows in Redis.
        question = prompt(50)
        cold = pod.complete(question)
        assert cold.num_cached == 0
        hit(pod, question, cold)
        assert pod.stats()["memory"]["hits"] > 0
    finally:
        node.api.delete(CLUSTERS, SETTINGS, app.NAMESPACE)
        deployment.delete()
