"""Engines of two pods, groups, on a real kubelet. The tests depend on their order.

The first engine has four ranks of a dense model, which serve separately: two in each pod, which share a
sidecar. In the second engine, two tensor-parallel ranks compute each request together, one in each pod.
"""

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from testing.kube.operator import CLUSTERS
from testing.node.app import NAMESPACE, App
from testing.node.cluster import NODE
from testing.node.pods import ENGINE_PORT, Completion, Pod, complete
from tests.harness.operator.client_pods import client_pod
from tests.harness.operator.pods import least_cached, prompt, retained, termination_states

NAME = "nodes"
PARTS = "0-0", "0-1"
"""Group and rank in the names of pods."""
QUESTION = prompt(71, 2048)
# The first pod computes the rest of a stream while the processes of the other pod end. With 500 tokens on two
# cores, the launcher of the other pod waited up to 5 s for a core.
NUM_TOKENS = 100
GROUP_KINDS = "apps/v1/statefulsets", "networking.k8s.io/v1/networkpolicies"
LISTENING = "0A"
"""State of a socket in /proc/net/tcp."""


@pytest.fixture(scope="module")
def app(make_app) -> Iterator[App]:
    app: App = make_app(NAME)
    engine = app.spec["spec"]["engine"]
    engine |= {"nodes": 2, "parallelism": {"data": 4}}
    engine["args"] = [argument.replace("=167772160", "=41943040") for argument in engine["args"]]
    app.apply()
    app.node.reached("engine over two nodes: applied")
    yield app
    app.node.kubectl("uncordon", NODE)
    if app.pods():  # a test failed before the last one
        app.delete()


def ready_parts(app: App) -> list[Pod]:
    return [app.ready_pod(part) for part in PARTS]


def ask(pod: Pod, rank: int | None, question: list[int]) -> Completion:
    """The answer of one of the pod's two data-parallel ranks, or of its only one."""
    headers = {} if rank is None else {"X-data-parallel-rank": f"{rank}"}
    return complete(pod.address, question, headers=headers)


def wait_hit(pod: Pod, rank: int | None, cold: Completion) -> None:
    """Wait until a rank hits the whole question from the pod's sidecar. All answers are that of ``cold``."""

    def look() -> bool:
        pod.reset_engine_cache()
        answer = ask(pod, rank, QUESTION)
        assert answer.tokens == cold.tokens
        return answer.num_cached >= least_cached(QUESTION)

    pod.node.wait(look, 180)


@pytest.fixture(scope="module")
def cold(app) -> Completion:
    """The answer of rank 0 of the first pod without any cache."""
    return ask(ready_parts(app)[0], 0, QUESTION)


def test_both_pods_serve(app):
    pods = ready_parts(app)
    app.node.reached("engine over two nodes: all pods ready")
    app.wait_condition("Ready")
    answers = [ask(pod, rank, prompt(70, 64)) for pod in pods for rank in range(2)]
    assert all(answer.tokens == answers[0].tokens for answer in answers)
    assert [pod.container("engine")["restartCount"] for pod in pods] == [0, 0]


def test_prompt_of_one_rank_is_a_hit_in_all_others(app, cold):
    assert cold.num_cached == 0
    for pod in ready_parts(app):
        for rank in range(2):
            wait_hit(pod, rank, cold)


def vllm_port(pod: Pod) -> int:
    """A port for other parts of vLLM: one at the pod's address only."""
    here = "".join(f"{int(byte):02X}" for byte in reversed(pod.address.split(".")))
    lines = [line.split() for line in pod.exec("engine", "cat", "/proc/net/tcp").splitlines()[1:]]
    sockets = [line[1].split(":") for line in lines if line[3] == LISTENING]
    return min(int(port, 16) for address, port in sockets if address == here)


def test_ports_of_vllm_are_open_only_to_the_group(app, cold, references):
    leader, follower = ready_parts(app)
    port = vllm_port(leader)
    with client_pod(app.node, NAMESPACE, references["sidecar"]) as client:
        app.node.wait(lambda: client.reaches(leader, ENGINE_PORT), 60)
        assert not client.reaches(leader, port)
    connect = f"import socket; socket.create_connection(({leader.address!r}, {port}), 10)"
    follower.exec("engine", "python3", "-c", connect)


def processes(pod: Pod) -> dict[int, str]:
    """Titles of the engine's processes."""
    pids = map(int, (pod.group("engine") / "cgroup.procs").read_text().split())
    return {pid: Path(f"/proc/{pid}/cmdline").read_text().partition("\0")[0] for pid in pids}


def last_output(pod: Pod) -> str:
    """The last line of the engine's container before its restart."""
    message: str = pod.container("engine")["lastState"]["terminated"]["message"]
    return message.splitlines()[-1]


def num_restarts(pod: Pod, container: str) -> int:
    return int(pod.container(container)["restartCount"])


def restarted(app: App, title: str) -> list[Pod]:
    """Kill a process of vLLM in the second pod, and return both pods when they are ready again.

    vLLM restarts in both pods. The sidecars continue with their rows.
    """
    before = ready_parts(app)
    rows = [pod.stats()["memory"]["used_rows"] for pod in before]
    former = [num_restarts(pod, "engine") for pod in before]
    (rank,) = (pid for pid, name in processes(before[1]).items() if name == title)
    os.kill(rank, signal.SIGKILL)
    app.node.reached(f"{app.name}: a rank killed")
    app.node.wait(lambda: [num_restarts(app.pod(part), "engine") - 1 for part in PARTS] == former, 120)
    after = ready_parts(app)
    app.node.reached(f"{app.name}: all pods ready again")
    assert [(pod.uid, num_restarts(pod, "sidecar")) for pod in after] == [(pod.uid, 0) for pod in before]
    assert last_output(after[0]).startswith(f"error: part 1 of 2 ({before[1].name}) ended: vLLM exited with ")
    assert [pod.stats()["memory"]["used_rows"] for pod in after] == rows
    return after


def test_a_killed_rank_restarts_vllm_in_both_pods_with_its_cache(app, cold):
    for pod in restarted(app, "VLLM::EngineCore_DP3"):
        for rank in range(2):
            wait_hit(pod, rank, cold)
    app.wait_condition("Ready")


def is_ending(pod: Pod) -> bool:
    """Whether a vLLM whose processes are stopped has received SIGTERM."""
    states = [Path(f"/proc/{pid}/status").read_text() for pid in processes(pod)]
    pending = [int(mask, 16) for mask in re.findall(r"^ShdPnd:\s*(\w+)$", "\n".join(states), re.MULTILINE)]
    return any(mask & 1 << signal.SIGTERM - 1 for mask in pending)


def check_drain_of_second_pod(app: App) -> None:
    """The first pod is unready before its vLLM gets SIGTERM. Then vLLM finishes the stream."""
    leader, follower = ready_parts(app)
    app.node.kubectl("cordon", NODE)
    with retained(follower), ThreadPoolExecutor(1) as threads:
        with leader.stopped_during(threads, prompt(72, 64), NUM_TOKENS, but_first=True) as request:
            app.node.api.delete("v1/pods", follower.name, NAMESPACE)
            app.node.reached(f"{app.name}: a pod deleted")
            app.node.wait(lambda: not app.pod(PARTS[0]).is_ready, 60)
            app.node.reached(f"{app.name}: the other pod unready")
            assert not is_ending(leader)
            app.node.wait(lambda: is_ending(leader), 60)
            assert not request.done()
        assert len(request.result().tokens) == NUM_TOKENS
        states = app.node.wait(lambda: termination_states(app.pod(PARTS[1])), 180)
        app.node.reached(f"{app.name}: the deleted pod ended")
        assert [state["exitCode"] for state in states] == [0, 0]
    # The kubelet delays the second restart of a container.
    cause = f"error: part 1 of 2 ({follower.name}) was terminated"
    app.node.wait(lambda: last_output(app.pod(PARTS[0])) == cause, 60)


def test_a_drain_of_one_pod_fails_no_request(app, cold):
    check_drain_of_second_pod(app)


def test_deletion_leaves_nothing(app):
    secret = app.secret_name("group")
    app.node.api.delete(CLUSTERS, NAME, NAMESPACE)

    def remaining() -> list[str]:
        objects = [*((kind, f"{NAME}-engine-0") for kind in GROUP_KINDS), ("v1/secrets", secret)]
        return [kind for kind, name in objects if app.node.api.find(kind, name, NAMESPACE)]

    app.node.wait(lambda: not app.pods() and not remaining(), 120)


@pytest.fixture(scope="module")
def spread(make_app) -> Iterator[App]:
    """An engine with a tensor-parallel rank in each of its two pods."""
    app: App = make_app("spread")
    app.node.kubectl("uncordon", NODE)  # a test of the first engine drained it
    app.spec["spec"]["engine"] |= {"nodes": 2, "parallelism": {"tensor": 2}}
    app.apply()
    app.node.reached("spread: applied")
    yield app
    app.delete()


def test_ranks_in_two_pods_hit_together_after_a_restart(spread):
    """The first pod has vLLM's server, and the launcher of the other one leads there."""
    leader, follower = ready_parts(spread)
    spread.node.reached("spread: all pods ready")
    spread.wait_condition("SidecarAttached")
    cold = ask(leader, None, QUESTION)
    assert cold.num_cached == 0
    assert ask(follower, None, QUESTION).tokens == cold.tokens
    wait_hit(leader, None, cold)
    lookups = [pod.stats()["lookups"] for pod in (leader, follower)]
    assert [each["gpus"] for each in lookups] == [2, 0]
    sizes = [(each["row_bytes"], each["engine_kv_bytes"]) for each in lookups]
    assert sizes[0] == sizes[1]
    assert all(sizes[0])
    for pod in restarted(spread, "VLLM::Worker_TP1"):
        assert pod.is_ready
    wait_hit(leader, None, cold)
    endpoints = spread.node.api.objects(
        "discovery.k8s.io/v1/endpointslices", NAMESPACE, f"kubernetes.io/service-name={spread.name}"
    )
    addresses = [each["addresses"] for item in endpoints for each in item["endpoints"]]
    assert addresses == [[leader.address]]


def test_a_drain_of_a_pod_without_a_server_fails_no_request(spread):
    """vLLM computes in both pods until the server in the first pod has finished its requests."""
    check_drain_of_second_pod(spread)
