"""The router with the rights that the operator gives it, on a real API server: it finds the engine pods."""

import contextlib
import http.server
import json
import random
import socketserver
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

import pytest

from lmcache_operator.api.parse import Platform, parse
from lmcache_operator.components.router.router import Routing
from testing.child_process import answers, wait_until
from testing.router import RouterProcess
from tests.harness.commands.json_server import JsonHandler, serving
from tests.harness.kube import CLUSTERS, NAME, example
from tests.harness.operator.clusters import HELD, condition, set_running
from tests.harness.operator.render import CONTEXT

pytestmark = pytest.mark.kube

ENGINE_PORT = 8000
ROUTER = f"{NAME}-router"


class Engine(JsonHandler):
    """The answers of an engine, which name the engine's address."""

    def do_GET(self) -> None:
        self.answer({"status": "ok"})

    def do_POST(self) -> None:
        self.body()
        choices = [{"index": 0, "text": address_of(self.server), "finish_reason": "stop"}]
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        kind = {"id": "1", "object": "text_completion", "model": "m"}
        self.answer(kind | {"choices": choices, "usage": usage})


def address_of(server: socketserver.BaseServer) -> str:
    assert isinstance(server.server_address, tuple)
    return str(server.server_address[0])


@pytest.fixture
def engines() -> Iterator[list[http.server.ThreadingHTTPServer]]:
    """One engine has an address of IPv4, and the other one an address of IPv6."""
    with contextlib.ExitStack() as stack:
        address = f"127.{random.randrange(100, 200)}.{random.randrange(256)}.1"
        yield [stack.enter_context(serving(Engine, (each, ENGINE_PORT))) for each in (address, "::1")]


def answering_engine(router: RouterProcess) -> str:
    """Send a request through the router. Returns the address of the engine; empty: no engine answered."""
    body = json.dumps({"model": "m", "prompt": [1, 2, 3], "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"{router.url}/v1/completions", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(json.load(answer)["choices"][0]["text"])
    except urllib.error.HTTPError:
        return ""


def test_router_finds_engine_pods_with_the_rights_of_its_role(plane, operator, namespace, engines):
    addresses = list(map(address_of, engines))
    resource = example(router={"policy": "RoundRobin", "replicas": 1})
    resource["spec"]["engine"] = resource["spec"].get("engine", {}) | {"replicas": 2, "podTemplate": HELD}
    plane.api.create(CLUSTERS, resource, namespace)
    plane.wait(lambda: plane.api.find("apps/v1/deployments", ROUTER, namespace))
    dual_stack = replace(parse(plane.api.get(CLUSTERS, NAME, namespace)), platform=Platform(host="::"))
    deployment = Routing().render(dual_stack, CONTEXT)[-1]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    plane.wait(lambda: plane.api.find("rbac.authorization.k8s.io/v1/rolebindings", ROUTER, namespace))
    pods = [f"{NAME}-engine-{number}" for number in range(2)]
    plane.wait(lambda: all(plane.api.find("v1/pods", pod, namespace) for pod in pods))

    token = plane.service_account_token(namespace, ROUTER)
    kubeconfig = str(plane.kubeconfig(f"router-{namespace}", token=token))
    with RouterProcess([], *container["args"], KUBECONFIG=kubeconfig) as router:
        assert answering_engine(router) == ""
        assert answers(f"http://[::1]:{router.port}/liveness")
        assert all(answers(f"http://{host}:{router.metrics_port}/metrics") for host in ("127.0.0.1", "[::1]"))
        for pod, address in zip(pods, addresses, strict=True):
            set_running(plane, namespace, pod, address)
        answered: set[str] = set()

        def are_all_found() -> bool:
            answered.add(answering_engine(router))
            return set(addresses) <= answered

        wait_until(are_all_found, what=f"requests to both engines; log {router.log[-2000:]}")
        # A pod that is deleted gets no more requests.
        plane.api.patch(CLUSTERS, NAME, {"spec": {"engine": {"replicas": 1}}}, namespace)
        plane.wait(lambda: plane.api.find("v1/pods", pods[1], namespace) is None)
        wait_until(lambda: f"http://[{addresses[1]}]:{ENGINE_PORT}" not in workers(router), what="removal")
        assert {answering_engine(router) for _ in range(4)} == {addresses[0]}

    status = {"pools": 1, "replicas": 1, "readyReplicas": 1}
    plane.wait(lambda: plane.api.get(CLUSTERS, NAME, namespace)["status"].get("router") == status)
    assert condition(plane, namespace, "RouterAvailable")["status"] == "True"
    plane.api.patch(CLUSTERS, NAME, {"spec": {"router": None}}, namespace)
    for kind in (
        "apps/v1/deployments", "v1/services", "v1/serviceaccounts", "rbac.authorization.k8s.io/v1/roles",
        "rbac.authorization.k8s.io/v1/rolebindings", "networking.k8s.io/v1/networkpolicies",
        "policy/v1/poddisruptionbudgets",
    ):  # fmt: skip
        plane.wait(lambda kind=kind: plane.api.find(kind, ROUTER, namespace) is None)
    assert plane.api.find("v1/services", NAME, namespace)


def workers(router: RouterProcess) -> list[str]:
    with urllib.request.urlopen(f"{router.url}/list_workers", timeout=60) as answer:
        return [str(url) for url in json.load(answer)["urls"]]
