"""Tokens for the sidecar's pages, as a Secret that a real kubelet mounts for the uids of the images."""

import base64
from urllib.error import HTTPError

import pytest

from testing.kube.operator import CLUSTERS
from testing.node.app import NAMESPACE
from testing.node.pods import SIDECAR_PORT

NAME = "tokens"


@pytest.fixture
def app(make_app):
    app = make_app(NAME)
    app.spec["spec"]["sidecar"] = {"httpAuthentication": "Token"}
    app.apply()
    yield app
    app.delete()


def test_operator_reads_a_sidecar_that_refuses_clients_without_a_token(app):
    pod = app.ready_pod()
    assert app.wait_condition("SidecarAttached")["reason"] == "Attached"
    assert app.wait_condition("TokensRequired")["reason"] == "Required"
    for path in ("/metrics", "/stats", "/samples", "/requests", "/hints"):
        with pytest.raises(HTTPError) as refused:
            pod.get(SIDECAR_PORT, path)
        assert refused.value.code == 401
    status = app.node.api.get(CLUSTERS, app.name, NAMESPACE)["status"]
    assert status["transfer"]["mode"] == "SharedMemory", "the operator has read /stats"
    volumes = {volume["name"]: volume for volume in pod.object["spec"]["volumes"]}
    (engine,) = pod.object["spec"]["containers"]
    assert volumes["pages"]["secret"]["secretName"] == app.secret_name("pages")
    assert "pages" not in {mount["name"] for mount in engine["volumeMounts"]}
    secret = app.node.api.get("v1/secrets", app.secret_name("pages"), NAMESPACE)
    assert {len(base64.b64decode(value)) for value in secret["data"].values()} == {43, 64}
