"""An in-place resize of a running sidecar that its node does not grant."""

from testing.node import groups
from tests.harness.operator.pods import has_size, sidecar_limit

SECONDS = 180


def test_resize_beyond_the_node_is_reported_and_reverted(make_app):
    app = make_app("crowded", memory={"size": "512Mi"})
    # The limits of a pod bound its volumes in memory. Without the engine's limit, only the node bounds them.
    (engine,) = app.spec["spec"]["engine"]["podTemplate"]["spec"]["containers"]
    del engine["resources"]["limits"]
    app.spec["spec"]["autoscaling"] = {"memory": {"maxSize": "64Gi"}}
    app.apply()
    before = app.ready_pod()
    app.declare_memory("60Gi")
    message = app.wait_condition("Degraded", timeout=SECONDS)["message"]
    assert "node didn't have enough allocatable resources: memory" in message
    limit = groups.memory_limit(before.group("sidecar"))
    app.node.wait(lambda: sidecar_limit(app.pod()) == f"{limit >> 20}Mi", SECONDS)
    assert app.conditions()["Ready"]["status"] == "True"
    app.declare_memory("256Mi")
    app.node.wait(lambda: has_size(app, 256 << 20), SECONDS)
    app.wait_condition("Degraded", "False")
    after = app.ready_pod()
    assert after.uid == before.uid
    assert after.container("sidecar")["restartCount"] == 0
    app.delete()
