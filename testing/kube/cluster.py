"""A Kubernetes control plane on loopback: etcd, API server, controller-manager, scheduler, and fake nodes.

    python -m testing.kube.cluster            # stays in the foreground; Ctrl-C stops everything
    with Cluster(crds=[path]) as cluster:     # up in about 5 s
        cluster.api.objects("v1/nodes")

Scheduling, controllers, garbage collection, admission and CEL are real. kwok sets pods Ready: nothing runs in
them, probes are not run, and claims for volumes stay pending.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, ClassVar, Self, TypeVar

from testing.child_process import free_ports
from testing.kube import pki
from testing.kube.api import (
    PATIENCE,
    Api,
    ApiError,
    Object,
    close_idle_connections,
    manifests,
    wait_for,
)
from testing.kube.audit import AuditLog, Request
from testing.kube.process import Component
from tools.kube import binaries

HERE = Path(__file__).resolve().parent
PROGRAMS = binaries.CLUSTER
CRDS = "apiextensions.k8s.io/v1/customresourcedefinitions"
PREFIX = "lmcache-kube-"
_LOG_LINES, _NOTE_CHARS = 15, 20_000
FAKE_NODE = "kwok.x-k8s.io/node"
NODE_CAPACITY = {
    "cpu": "64", "memory": "1Ti", "pods": "250", "ephemeral-storage": "8Ti", "nvidia.com/gpu": "8",
}  # fmt: skip
_RESTARTED = ("kube-controller-manager", "kube-scheduler")
"""Components that end by themselves to recover, for example when the scheduler's cache contradicts the API
server after a restart. On a real node, the kubelet starts them again."""
_MAX_RESTARTS = 20
T = TypeVar("T")


class Cluster:
    """A throw-away control plane. Its processes end with the thread that started them.

    ``crds`` are applied before the controller-manager starts. Children of a kind that is added later are
    garbage-collected only after the collector's next discovery, which can take 40 s.
    """

    programs: Sequence[str] = PROGRAMS
    api_server_flags: Sequence[str] = ("--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none")
    """Flags of this class of clusters, in addition to the common flags."""
    feature_gates: str = ""
    """Features of Kubernetes that are off by default, such as "A=true,B=true"."""

    go: ClassVar[dict[str, str]] = {"GOGC": "400", "GOMEMLIMIT": "600MiB", "GOMAXPROCS": "1"}
    """Settings of Go's runtime. They save a third of the processor time, and take 350 MiB more memory."""

    def __init__(self, *, crds: Sequence[Path] = (), num_nodes: int = 2, bin_dir: Path | None = None) -> None:
        """``bin_dir`` holds `PROGRAMS`. By default the pinned versions are used."""
        self.crds, self.num_nodes = crds, num_nodes
        self.bin = bin_dir or binaries.directory(self.programs)
        self.directory, self._owner = _new_directory()
        self.components: dict[str, Component] = {}
        self.seconds: dict[str, float] = {}
        """Seconds after the start, by step."""
        self._num_restarts = 0
        self._thread = threading.get_ident()  # components end with the thread that starts them

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException as error:
            for component in self.components.values():  # stop() removes the logs
                error.add_note("\n".join([f"{component.name}:", *component.log.splitlines()[-_LOG_LINES:]]))
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- for callers

    def kubeconfig(self, user: str = "admin", *, token: str = "") -> Path:
        """A kubeconfig file for one of `pki.USERS`, or for another ``user`` with a token."""
        path = self.directory / f"{user.replace(':', '-').replace('/', '-')}.kubeconfig"
        cluster = {"server": self.url, "certificate-authority": str(self.ca)}
        context = {"cluster": "local", "user": user, "namespace": "default"}
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "local",
            "clusters": [{"name": "local", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": token or self._tokens[user]}}],
            "contexts": [{"name": "local", "context": context}],
        }  # fmt: skip
        path.write_text(json.dumps(config))
        path.chmod(0o600)
        return path

    def service_account_token(
        self, namespace: str, name: str, seconds: int = 3600, *, audience: str = ""
    ) -> str:
        """A token like that of a pod with this ServiceAccount. Empty audience: the API server."""
        path = self.api.path("v1/serviceaccounts", namespace, f"{name}/token")
        audiences = {"audiences": [audience]} if audience else {}
        body = {"spec": {"expirationSeconds": seconds, **audiences}}
        token: str = self.api.request("POST", path, body)["status"]["token"]
        return token

    def kubectl(self, *argv: str | Path, stdin: str = "") -> str:
        """Standard output of kubectl, run as admin. Raises CalledProcessError with the reason in `stderr`."""
        return self._run("kubectl", *argv, stdin=stdin)

    def helm(self, *argv: str | Path) -> str:
        """Standard output of helm, run as admin. Raises CalledProcessError with the reason in `stderr`."""
        return self._run("helm", *argv)

    def wait(self, condition: Callable[[], T | None], timeout: float = PATIENCE) -> T:
        """Like `wait_for`, but fail at once if a component died, and describe the objects after a timeout."""

        def checked() -> T | None:
            self.check()
            return condition()

        try:
            return wait_for(checked, timeout)
        except TimeoutError as error:
            self._describe(error)
            raise

    def check(self) -> None:
        """Start controllers again that have ended by themselves. Raise `ProcessDied` if others have."""
        for component in self.components.values():
            is_restarted = component.name in _RESTARTED and self._num_restarts < _MAX_RESTARTS
            if is_restarted and not component.is_running and threading.get_ident() == self._thread:
                self._num_restarts += component.start_again()
            elif not is_restarted:
                component.check()

    def mark(self) -> int:
        """A position in the audit log, for `written_since`."""
        return self._audit.position()

    def written_since(
        self, mark: int, *, by: str = "", namespace: str = "", dry_runs: bool = False
    ) -> list[Request]:
        """Write requests answered since ``mark``, by users whose name contains ``by``."""
        return [
            write
            for write in self._audit.since(mark)
            if write.verb != "get"
            and by in write.user
            and namespace in ("", write.namespace)
            and (dry_runs or "dryRun=All" not in write.uri)
        ]

    def reads_since(self, mark: int, *, by: str, namespace: str) -> list[Request]:
        """Reads of one LMCacheCluster answered since ``mark``, by users whose name contains ``by``.

        Only those of ServiceAccounts are recorded.
        """
        return [
            request
            for request in self._audit.since(mark)
            if request.verb == "get" and by in request.user and request.namespace == namespace
        ]

    def kill(self, name: str) -> None:
        """Send SIGKILL. `restart` starts the component again on the same data."""
        self.components[name].kill()

    def restart(self, name: str) -> None:
        """Stop the component if it runs, start it, and wait until the API server is ready."""
        self.components[name].stop()
        self.components[name].start()
        self.wait(self._is_ready)

    def stop(self) -> None:
        """Stop clients first, then the API server, then etcd, and remove all files."""
        for component in reversed(self.components.values()):
            component.stop()
        close_idle_connections()
        shutil.rmtree(self.directory, ignore_errors=True)
        self._owner.close()

    # -- start

    def _start(self) -> None:
        self._begin = time.monotonic()
        self._tokens = pki.make(self.directory / "pki")
        self.ca = self.directory / "pki" / "ca.crt"
        self._audit = AuditLog(self.directory / "audit.jsonl")
        etcd_port, peer_port, api_port, manager_port, scheduler_port = free_ports(5)
        self.url = f"https://127.0.0.1:{api_port}"
        self.api = Api(self.url, self.ca, self._tokens["admin"])
        self._launch("etcd", *self._etcd_flags(etcd_port, peer_port))
        self._launch("kube-apiserver", *self._api_server_flags(api_port, etcd_port))
        # /readyz and not /livez: before the RBAC roles exist, the other components are refused and exit.
        self.wait(self._is_ready)
        self.reached("API server")
        self._apply_crds()
        self._launch("kube-controller-manager", *self._controller_manager_flags(manager_port))
        self._launch("kube-scheduler", *self._client_flags(pki.SCHEDULER, scheduler_port))
        self._start_nodes()
        self.wait(lambda: self.api.get("v1/serviceaccounts", "default", "default"))
        self.wait(lambda: sum(map(_is_schedulable, self.api.objects("v1/nodes"))) >= self.num_nodes)
        self.reached("nodes")

    def _start_nodes(self) -> None:
        """Start the programs that run pods or simulate it. Returns before they are ready."""
        (port,) = free_ports(1)
        self._launch(
            "kwok", f"--kubeconfig={self.kubeconfig('kwok')}", f"--config={HERE / 'stages.yaml'}",
            "--enable-crds=", f"--manage-nodes-with-annotation-selector={FAKE_NODE}=fake",
            "--node-lease-duration-seconds=40", f"--server-address=127.0.0.1:{port}",
            # No host has these addresses, and no packet leaves this machine: the pods do not exist.
            "--cidr=239.0.0.1/12",
        )  # fmt: skip
        for number in range(self.num_nodes):
            self.add_node(f"node-{number}")

    def reached(self, step: str) -> None:
        """Record in `seconds` that ``step`` is complete."""
        self.seconds[step] = time.monotonic() - self._begin

    def add_node(self, name: str) -> None:
        """Add a fake node with 8 GPUs."""
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
        metadata = {"name": name, "labels": labels, "annotations": {FAKE_NODE: "fake"}}
        status = {"capacity": NODE_CAPACITY, "allocatable": NODE_CAPACITY}
        self.api.create("v1/nodes", {"metadata": metadata, "status": status})

    def _apply_crds(self) -> None:
        for crd in manifests(*self.crds):
            self.api.apply(CRDS, crd)
            name = crd["metadata"]["name"]
            self.wait(lambda name=name: _condition(self.api.get(CRDS, name), "Established"))  # type: ignore[misc]

    def _is_ready(self) -> bool:
        try:
            return bool(self.api.request("GET", "/readyz") == "ok")
        except ApiError:  # 500 while its hooks run
            return False

    def _launch(self, program: str, *flags: str) -> None:
        log = self.directory / f"{program}.log"
        component = Component(program, [self.bin / program, *flags], log, **self.go)
        self.components[program] = component
        component.start()

    def _describe(self, error: Exception) -> None:
        """Add the state of all objects to an error, because the cluster will be removed."""
        kinds = "lmcacheclusters,statefulsets,pods,poddisruptionbudgets"
        columns = "N:.metadata.namespace,KIND:.kind,NAME:.metadata.name,DELETED:.metadata.deletionTimestamp,"
        columns += "STATUS:.status"
        for argv in (
            ("get", kinds, "--output", f"custom-columns={columns}"),
            ("get", "events", "--sort-by", ".lastTimestamp"),
        ):
            with contextlib.suppress(subprocess.CalledProcessError):
                error.add_note(self.kubectl(*argv, "--all-namespaces", "--ignore-not-found")[-_NOTE_CHARS:])

    def _run(self, program: str, *argv: str | Path, stdin: str = "") -> str:
        env = {**os.environ, "KUBECONFIG": str(self.kubeconfig()), "HOME": str(self.directory)}
        command = [self.bin / program, *argv]
        return subprocess.run(
            command, input=stdin, env=env, capture_output=True, text=True, check=True
        ).stdout

    def _etcd_flags(self, port: int, peer_port: int) -> list[str]:
        client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer_port}"
        return [
            f"--data-dir={self.directory / 'etcd'}", f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync", "--log-level=warn",
        ]  # fmt: skip

    def _api_server_flags(self, port: int, etcd_port: int) -> list[str]:
        keys = self.ca.parent
        return [
            "--bind-address=127.0.0.1", f"--secure-port={port}",
            f"--etcd-servers=http://127.0.0.1:{etcd_port}",
            f"--tls-cert-file={keys}/api.crt", f"--tls-private-key-file={keys}/api.key",
            f"--client-ca-file={self.ca}", f"--token-auth-file={keys}/tokens.csv",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={keys}/sa.pub",
            f"--service-account-signing-key-file={keys}/sa.key",
            "--service-cluster-ip-range=10.96.0.0/16", "--authorization-mode=Node,RBAC",
            "--allow-privileged=true", "--profiling=false", "--enable-priority-and-fairness=false",
            f"--audit-policy-file={HERE / 'audit-policy.yaml'}", f"--audit-log-path={self._audit.path}",
            "--audit-log-maxsize=4096",  # MiB; marks are positions in one file, so it must not be rotated
            # Without these flags it waits 30 s and more for open watches before it stops.
            "--shutdown-watch-termination-grace-period=2s", "--request-timeout=10s",
            "--min-request-timeout=60", *self.api_server_flags, *self._gates(),
        ]  # fmt: skip

    def _client_flags(self, user: str, port: int) -> list[str]:
        return [
            f"--kubeconfig={self.kubeconfig(user)}", "--bind-address=127.0.0.1", f"--secure-port={port}",
            f"--cert-dir={self.directory / str(port)}", "--leader-elect=false",
            "--kube-api-qps=500", "--kube-api-burst=1000", *self._gates(),
        ]  # fmt: skip

    def _gates(self) -> list[str]:
        return [f"--feature-gates={self.feature_gates}"] if self.feature_gates else []

    def _controller_manager_flags(self, port: int) -> list[str]:
        keys = self.ca.parent
        return [
            *self._client_flags(pki.CONTROLLER_MANAGER, port), "--controllers=*",
            "--use-service-account-credentials=true", f"--root-ca-file={self.ca}",
            f"--service-account-private-key-file={keys}/sa.key",
            f"--cluster-signing-cert-file={self.ca}", f"--cluster-signing-key-file={keys}/ca.key",
        ]  # fmt: skip


def _new_directory() -> tuple[Path, IO[bytes]]:
    """Create a directory, and a file whose lock shows that this process lives. Removes directories of killed
    runs.

    The directory is on a tmpfs if there is one: etcd writes a lot, and its data is not needed later.
    """
    shm = Path("/dev/shm")
    base = shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())
    for owner in base.glob(f"{PREFIX}*/owner"):
        with contextlib.suppress(OSError), owner.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(owner.parent)
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    lock = (directory / "owner").open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return directory, lock


def _condition(obj: Object, kind: str) -> bool:
    conditions = obj.get("status", {}).get("conditions") or []  # null before the first condition
    return any(c["type"] == kind and c["status"] == "True" for c in conditions)


def _is_schedulable(node: Object) -> bool:
    return _condition(node, "Ready") and not node["spec"].get("taints")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=2, help="number of fake nodes, 8 GPUs each (default 2)")
    options = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    crds = sorted((HERE.parent.parent / "crds").glob("*.yaml"))
    with Cluster(crds=crds, num_nodes=options.nodes) as cluster:
        steps = ", ".join(f"{step} after {seconds:.1f} s" for step, seconds in cluster.seconds.items())
        print(f"up: {steps}\n\n  export KUBECONFIG={cluster.kubeconfig()}", flush=True)
        print(f"  export PATH={cluster.bin}:$PATH   # kubectl, helm\n\nCtrl-C stops it.", flush=True)
        while not stop.wait(1):
            cluster.check()
    return 0


if __name__ == "__main__":
    sys.exit(main())
