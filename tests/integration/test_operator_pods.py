"""Events about a cluster, and Secrets that pull the images of its pods, on a real API server."""

import pytest

from tests.harness.kube import CLUSTERS, NAME, example
from tests.harness.operator.clusters import reconcile_once_more, wait_ready

pytestmark = pytest.mark.kube


def test_pods_pull_images_with_secrets_of_their_service_account_or_of_the_spec(plane, operator, namespace):
    """The guide on private registries says so. The operator must not change a field of the ServiceAccount."""
    secrets = [{"name": "registry"}]
    resource = example(router={})
    resource["spec"]["tiers"]["remote"] = {"managed": {"memoryPerShard": "1Gi"}}
    plane.api.create(CLUSTERS, resource, namespace)
    wait_ready(plane, namespace)
    accounts = f"{NAME}-engine", f"{NAME}-router", f"{NAME}-remote"
    for account in accounts:
        plane.api.patch("v1/serviceaccounts", account, {"imagePullSecrets": secrets}, namespace)
    reconcile_once_more(plane, operator, namespace)
    for account in accounts:
        assert plane.api.get("v1/serviceaccounts", account, namespace)["imagePullSecrets"] == secrets
    for pod in plane.api.objects("v1/pods", namespace):
        plane.api.delete("v1/pods", pod["metadata"]["name"], namespace)

    def secrets_of_pods() -> dict[str, set[str]]:
        """Names of the Secrets that the pods of each component have."""
        by_component: dict[str, set[str]] = {}
        for pod in plane.api.objects("v1/pods", namespace):
            names = {each["name"] for each in pod["spec"].get("imagePullSecrets", [{"name": ""}])}
            by_component.setdefault(pod["metadata"]["labels"]["lmcache.io/component"], set()).update(names)
        return by_component

    plane.wait(lambda: secrets_of_pods() == {name: {"registry"} for name in ("engine", "router", "remote")})
    template = {"spec": {"imagePullSecrets": [{"name": "mine"}, {"name": "declared"}]}}
    change = {"images": {"pullSecrets": ["declared"]}, "engine": {"podTemplate": template}}
    plane.api.patch(CLUSTERS, NAME, {"spec": change}, namespace)
    expected = {"engine": {"declared", "mine"}, "router": {"declared"}}
    plane.wait(lambda: expected.items() <= secrets_of_pods().items())
