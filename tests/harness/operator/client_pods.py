"""Pods that can run Python and have no cache, for tests of NetworkPolicies on a node."""

import contextlib
import subprocess
from collections.abc import Iterator

from testing.kube.api import Object
from testing.node.cluster import NodeCluster
from testing.node.pods import Pod

_NAME = "client"
_PYTHON = "/opt/lmcache/venv/bin/python"
_REACH = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3).close()"


class ClientPod:
    """A running client pod."""

    def __init__(self, node: NodeCluster, namespace: str) -> None:
        self._node, self._namespace = node, namespace

    @property
    def is_running(self) -> bool:
        live = self._node.api.get("v1/pods", _NAME, self._namespace)
        return bool(live["status"].get("phase") == "Running")

    def reaches(self, pod: Pod, port: int) -> bool:
        """Whether the client can connect to a port of another pod."""
        command = ("exec", "-n", self._namespace, _NAME, "--", _PYTHON, "-c", _REACH, pod.address, str(port))
        with contextlib.suppress(subprocess.CalledProcessError):
            self._node.kubectl(*command)
            return True
        return False


@contextlib.contextmanager
def client_pod(node: NodeCluster, namespace: str, image: str) -> Iterator[ClientPod]:
    """Run a client, one in each namespace. ``image``: reference of the sidecar's image, which has Python."""
    node.api.create("v1/pods", _manifest(image), namespace)
    client = ClientPod(node, namespace)
    try:
        node.wait(lambda: client.is_running, 120)
        yield client
    finally:
        node.api.delete("v1/pods", _NAME, namespace)


def _manifest(image: str) -> Object:
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": "client",
        "image": image,
        "command": ["sleep", "infinity"],
        "securityContext": security,
    }
    pod_security = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {"containers": [container], "securityContext": pod_security, "terminationGracePeriodSeconds": 0}
    return {"metadata": {"name": _NAME}, "spec": {**spec, "automountServiceAccountToken": False}}
