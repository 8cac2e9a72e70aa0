"""The operator next to a control plane, run as in its pod: with the chart's token and rights, as a user
without name and home, on a read-only root file system.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from testing.child_process import SOURCES, ChildProcess, free_ports
from testing.kube.api import wait_for
from testing.kube.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "lmcache-operator"
CRDS = sorted((ROOT / "crds").glob("*.yaml"))
CLUSTERS = "lmcache.io/v1alpha1/lmcacheclusters"
SYSTEM_NAMESPACE, RELEASE = "lmcache-system", "lmcache"
SERVICE_ACCOUNT = "lmcache-lmcache-operator"
USER = 65532
"""User id of the operator's image. It has no entry in /etc/passwd."""
# Interpreter and checkout replace the image's files. They may be readable for root only.
_AS_IN_ITS_POD = f"""
mount -t tmpfs tmpfs /run
mkdir -p /run/secrets/kubernetes.io/serviceaccount
cp "$TOKEN" /run/secrets/kubernetes.io/serviceaccount/token
cp "$CA" /run/secrets/kubernetes.io/serviceaccount/ca.crt
mount -o remount,bind,ro /
unset TOKEN CA
exec setpriv --pdeathsig KILL --reuid {USER} --regid {USER} --clear-groups --no-new-privs \\
  --inh-caps=-all,+dac_read_search --ambient-caps=-all,+dac_read_search "$@"
"""


def token_id(token: str) -> str:
    """The API server's name for a ServiceAccount token."""
    claims = token.split(".")[1]
    return f"JTI={json.loads(base64.urlsafe_b64decode(claims + '=' * (-len(claims) % 4)))['jti']}"


def install(plane: Cluster) -> str:
    """Install the chart for all namespaces. Returns "namespace/name" of its ServiceAccount."""
    plane.helm(
        "install", RELEASE, CHART, "--namespace", SYSTEM_NAMESPACE, "--create-namespace",
        "--set", "crds.enabled=false",
    )  # fmt: skip
    return f"{SYSTEM_NAMESPACE}/{SERVICE_ACCOUNT}"


def chart_flags(plane: Cluster, name: str = SERVICE_ACCOUNT, namespace: str = SYSTEM_NAMESPACE) -> list[str]:
    """Flags with which the Deployment of a release runs the operator."""
    pod = plane.api.get("apps/v1/deployments", name, namespace)["spec"]["template"]["spec"]
    command, *flags = map(str, pod["containers"][0]["args"])
    assert (command, pod["securityContext"]["runAsUser"]) == ("run", USER)
    return flags


class Operator(ChildProcess):
    """``lmcache-operator run`` as a child process, with a ServiceAccount of the cluster.

    Without root it cannot run as in its pod. It then is a process of this user with a kubeconfig.
    """

    def __init__(
        self,
        plane: Cluster,
        directory: Path,
        account: str,
        *flags: str,
        program: Sequence[str] = ("-m", "lmcache_operator"),
    ) -> None:
        self.user = f"system:serviceaccount:{account.replace('/', ':')}"
        super().__init__("the operator", directory / "operator.log")
        self.token = ""
        """Id of the token of its current run, which audit events have, too."""
        self._plane, self._account, self._program = plane, account, program
        self.health_port, self.metrics_port = free_ports(2)
        self._flags = (*flags, f"--health-port={self.health_port}", f"--metrics-port={self.metrics_port}")
        self._marks = 0, 0

    def start(self) -> None:
        namespace, _, name = self._account.partition("/")
        token = self._plane.service_account_token(namespace, name)
        self.token = token_id(token)
        argv = [sys.executable, *self._program, "run", *self._flags]
        env = {"PYTHONPATH": SOURCES, "PYTHONUNBUFFERED": "1"}
        env["POD_NAME"] = self.log_path.parent.name
        if os.getuid() == 0:
            token_file = self.log_path.with_suffix(".token")
            token_file.write_text(token)
            host, _, port = self._plane.url.removeprefix("https://").partition(":")
            env |= {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
            env |= {"TOKEN": str(token_file), "CA": str(self._plane.ca), "PATH": os.environ["PATH"]}
            argv = ["unshare", "--mount", "--propagation=private", "sh", "-ec", _AS_IN_ITS_POD, "sh", *argv]
        else:
            argv.append(f"--kubeconfig={self._plane.kubeconfig(self._account, token=token)}")
        self.spawn(argv, env=env)
        wait_for(self._is_healthy)

    def metric(self, name: str) -> float:
        """The value of a metric in its /metrics, summed over all labels."""
        pattern = rf"^{name}(?:{{.*}})? (\S+)$"
        return sum(float(value) for value in re.findall(pattern, self.metrics(), re.MULTILINE))

    def metrics(self) -> str:
        """The text of its /metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=60) as answer:
            text: str = answer.read().decode()
        return text

    def num_reconciliations(self) -> float:
        """Number of reconciliations of all LMCacheClusters."""
        return self.metric("lmcache_operator_reconcile_seconds_count")

    def refusals(self) -> list[str]:
        """Requests that RBAC refused since `forgive`. Any entry is a missing right in the chart's roles.

        The operator's log also contains refusals of others, such as a controller that may not create a pod.
        """
        log_mark, audit_mark = self._marks
        writes = self._plane.written_since(audit_mark, by=self.user, dry_runs=True)
        lines = [*self.log[log_mark:].splitlines(), *map(str, writes)]
        return [line for line in lines if re.search(rf"User \W*{self.user}\W* cannot \w+ resource", line)]

    def forgive(self) -> None:
        """Ignore the refusals so far: an API server that starts has not read its roles yet."""
        self._marks = len(self.log), self._plane.mark()

    def _is_healthy(self) -> bool:
        self.check()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.health_port}/healthz", timeout=60) as answer:
            return bool(answer.status == 200)
