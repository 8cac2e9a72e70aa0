"""In-place resizes of a running sidecar by a changed spec."""

import random
import threading

import pytest

from testing.node import groups
from tests.harness.operator.pods import has_size, sidecar_limit

SECONDS = 180
PROMPT = [token + 4 for token in random.Random(11).choices(range(256), k=2048)]


@pytest.fixture
def stored_answer(tiny):
    """The answer to a prompt whose rows are in memory and written through."""
    pod = tiny.ready_pod()
    answer = pod.complete(PROMPT)
    tiny.node.wait(lambda: pod.stats()["num_unwritten_rows"] == 0, SECONDS)
    return answer


def test_changed_size_is_applied_under_load_without_a_restart(tiny, stored_answer):
    before = tiny.ready_pod()
    stop, answers, failures = threading.Event(), [], []

    def ask() -> None:
        while not stop.is_set():
            try:
                answers.append(before.complete(PROMPT).tokens == stored_answer.tokens)
            except OSError as error:
                failures.append(error)

    requests = threading.Thread(target=ask)
    requests.start()
    try:
        for size in (1024, 512):
            tiny.declare_memory(f"{size}Mi")
            tiny.node.wait(lambda size=size: has_size(tiny, size << 20), SECONDS)
            tiny.node.wait(lambda: tiny.conditions()["Progressing"]["reason"] == "Complete", SECONDS)
            assert tiny.conditions()["Ready"]["status"] == "True"
    finally:
        stop.set()
        requests.join()
    assert answers
    assert all(answers)
    assert failures == []
    after = tiny.ready_pod()
    assert after.uid == before.uid
    for container in ("sidecar", "engine"):
        assert after.container(container)["restartCount"] == before.container(container)["restartCount"]
    after.reset_engine_cache()
    answer = after.complete(PROMPT)
    assert (answer.tokens, answer.num_cached > 0) == (stored_answer.tokens, True)


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
