"""Tokens for the sidecar's pages, as files that a real kubelet mounts for the uids of the images."""

from urllib.error import HTTPError

import pytest

from testing.kube.operator import CLUSTERS
from testing.node.app import NAMESPACE
from testing.node.pods import SIDECAR_PORT

NAME = "tokens"
BINDINGS = "rbac.authorization.k8s.io/v1/clusterrolebindings"
BINDING = {
    "metadata": {"name": f"{NAMESPACE}-{NAME}-reviews"},
    "roleRef": {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": "system:auth-delegator",
    },
    "subjects": [{"kind": "ServiceAccount", "name": f"{NAME}-engine", "namespace": NAMESPACE}],
}


@pytest.fixture
def app(make_app):
    app = make_app(NAME)
    app.node.api.create(BINDINGS, BINDING)
    try:
        app.spec["spec"]["sidecar"] = {"httpAuthentication": "TokenReview"}
        app.apply()
        yield app
        app.delete()
    finally:
        app.node.api.delete(BINDINGS, BINDING["metadata"]["name"])


def test_operator_reads_a_sidecar_that_refuses_clients_without_a_token(app):
    pod = app.ready_pod()
    assert app.wait_condition("SidecarAttached")["reason"] == "Attached"
    assert app.wait_condition("TokensRequired")["reason"] == "Required"
    for path in ("/metrics", "/stats", "/samples", "/requests"):
        with pytest.raises(HTTPError) as refused:
            pod.get(SIDECAR_PORT, path)
        assert refused.value.code == 401
    status = app.node.api.get(CLUSTERS, app.name, NAMESPACE)["status"]
    assert status["transfer"]["mode"] == "SharedMemory", "the operator has read /stats"
    volumes = {volume["name"] for volume in pod.object["spec"]["volumes"]}
    (engine,) = pod.object["spec"]["containers"]
    assert "api-access" in volumes - {mount["name"] for mount in engine["volumeMounts"]}
