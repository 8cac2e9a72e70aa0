"""A Kubernetes control plane on loopback: etcd, API server, controller-manager, scheduler, kwok's fake nodes.

    python -m testing.kube.cluster            # stays in the foreground; Ctrl-C stops everything
    with Cluster(crds=[path]) as cluster:   # up in about 5 s
        cluster.api.objects("v1/nodes")

Scheduling, controllers, garbage collection, admission and CEL are the real ones. Pods are set Ready by kwok:
nothing runs in them, probes are not made, claims for volumes stay pending.
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
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar

from testing.child_process import free_ports
from testing.kube import pki
from testing.kube.api import PATIENCE, Api, ApiError, Object, manifests, wait_for
from testing.kube.process import Component
from tools.kube import binaries

HERE = Path(__file__).resolve().parent
PROGRAMS = binaries.CLUSTER
CRDS = "apiextensions.k8s.io/v1/customresourcedefinitions"
PREFIX = "lmcache-kube-"
_LOG_LINES, _NOTE_CHARS = 15, 20_000
TOKEN_ID = "authentication.kubernetes.io/credential-id"
FAKE_NODE = "kwok.x-k8s.io/node"
NODE_CAPACITY = {
    "cpu": "64", "memory": "1Ti", "pods": "250", "ephemeral-storage": "8Ti", "nvidia.com/gpu": "8",
}  # fmt: skip
T = TypeVar("T")


@dataclass(frozen=True)
class Write:
    """One answered write request, as the audit log has it."""

    user: str
    verb: str
    resource: str
    namespace: str
    name: str
    code: int
    message: str
    """Why it was refused."""
    uri: str
    token: str
    """Whose token it came with, as `testing.kube.operator.token_id` names it."""
    received: str
    answered: str
    """ISO times with microseconds, by the API server's clock."""


class Cluster:
    """A throw-away control plane. Its processes die with the thread that started it.

    ``crds`` are applied before the controller-manager starts; the children of a kind that comes later are
    garbage-collected only after the collector's next discovery, up to 40 s away.
    """

    programs: Sequence[str] = PROGRAMS
    api_server_flags: Sequence[str] = ("--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none")
    """Beyond those that all have."""

    def __init__(self, *, crds: Sequence[Path] = (), num_nodes: int = 2, bin_dir: Path | None = None) -> None:
        """``bin_dir`` holds `PROGRAMS`; by default they are the pinned ones."""
        self.crds, self.num_nodes = crds, num_nodes
        self.bin = bin_dir or binaries.directory(self.programs)
        self.directory, self._owner = _new_directory()
        self.components: dict[str, Component] = {}
        self.seconds: dict[str, float] = {}
        """When each step of the start was done."""

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException as error:
            for component in self.components.values():  # whose logs are gone in a moment
                error.add_note("\n".join([f"{component.name}:", *component.log.splitlines()[-_LOG_LINES:]]))
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- what callers use

    def kubeconfig(self, user: str = "admin", *, token: str = "") -> Path:
        """A kubeconfig file for one of `pki.USERS`, or for ``user`` with a token of its own."""
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

    def service_account_token(self, namespace: str, name: str, seconds: int = 3600) -> str:
        """A token as a pod of that ServiceAccount would get it."""
        path = self.api.path("v1/serviceaccounts", namespace, f"{name}/token")
        body = {"spec": {"expirationSeconds": seconds}}
        token: str = self.api.request("POST", path, body)["status"]["token"]
        return token

    def kubectl(self, *argv: str | Path, stdin: str = "") -> str:
        """Standard output of kubectl, run as admin. Raises CalledProcessError (`stderr` has the reason)."""
        return self._run("kubectl", *argv, stdin=stdin)

    def helm(self, *argv: str | Path) -> str:
        """Standard output of helm, run as admin. Raises CalledProcessError (`stderr` has the reason)."""
        return self._run("helm", *argv)

    def wait(self, what: Callable[[], T | None], timeout: float = PATIENCE) -> T:
        """`wait_for`, but a component that died is reported at once, and what is there when time is up."""

        def checked() -> T | None:
            self.check()
            return what()

        try:
            return wait_for(checked, timeout)
        except TimeoutError as error:
            self._describe(error)
            raise

    def check(self) -> None:
        """Raises `ProcessDied` for a component that ended by itself."""
        for component in self.components.values():
            component.check()

    def mark(self) -> int:
        """A point in the audit log, for `written_since`."""
        return self._audit.stat().st_size

    def written_since(
        self, mark: int, *, by: str = "", namespace: str = "", dry_runs: bool = False
    ) -> list[Write]:
        """Write requests answered since ``mark``, by users whose name has ``by`` in it."""
        with self._audit.open("rb") as log:
            log.seek(max(mark - 1, 0))
            # The first is empty, or the end of a line that was half written at the mark; the last may be half
            # written now.
            lines = log.read().split(b"\n")[bool(mark) : -1]
        writes = [_write(json.loads(line)) for line in lines]
        return [
            write
            for write in writes
            if by in write.user
            and namespace in ("", write.namespace)
            and (dry_runs or "dryRun=All" not in write.uri)
        ]

    def kill(self, name: str) -> None:
        """SIGKILL; `restart` brings the component back on the same data."""
        self.components[name].kill()

    def restart(self, name: str) -> None:
        """Stops the component if it runs, starts it, and waits until the API server is ready."""
        self.components[name].stop()
        self.components[name].start()
        self.wait(self._is_ready)

    def stop(self) -> None:
        """Clients first, the API server, etcd last; nothing is left behind."""
        for component in reversed(self.components.values()):
            component.stop()
        shutil.rmtree(self.directory, ignore_errors=True)
        self._owner.close()

    # -- start

    def _start(self) -> None:
        self._begin = time.monotonic()
        self._tokens = pki.make(self.directory / "pki")
        self.ca = self.directory / "pki" / "ca.crt"
        self._audit = self.directory / "audit.jsonl"
        self._audit.touch()
        etcd_port, peer_port, api_port, manager_port, scheduler_port = free_ports(5)
        self.url = f"https://127.0.0.1:{api_port}"
        self.api = Api(self.url, self.ca, self._tokens["admin"])
        self._launch("etcd", *self._etcd_flags(etcd_port, peer_port))
        self._launch("kube-apiserver", *self._api_server_flags(api_port, etcd_port))
        # /readyz and not /livez: before the RBAC roles are made, the other components are refused and exit.
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
        """What runs pods, or says so; it returns before they are ready."""
        (port,) = free_ports(1)
        self._launch(
            "kwok", f"--kubeconfig={self.kubeconfig('kwok')}", f"--config={HERE / 'stages.yaml'}",
            "--enable-crds=", f"--manage-nodes-with-annotation-selector={FAKE_NODE}=fake",
            "--node-lease-duration-seconds=40", f"--server-address=127.0.0.1:{port}",
            # Addresses to which nobody can connect, and no packet leaves this machine: pods are not there.
            "--cidr=239.0.0.1/12",
        )  # fmt: skip
        for number in range(self.num_nodes):
            self.add_node(f"node-{number}")

    def reached(self, step: str) -> None:
        """Note in `seconds` that ``step`` is done."""
        self.seconds[step] = time.monotonic() - self._begin

    def add_node(self, name: str) -> None:
        """A fake node with 8 GPUs."""
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
        component = self.components[program] = Component(program, [self.bin / program, *flags], log)
        component.start()

    def _describe(self, error: Exception) -> None:
        """Add what there is to an error that nobody can look into later."""
        kinds = "lmcacheclusters,statefulsets,pods,poddisruptionbudgets"
        columns = "N:.metadata.namespace,KIND:.kind,NAME:.metadata.name,GOES:.metadata.deletionTimestamp,"
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
            f"--audit-policy-file={HERE / 'audit-policy.yaml'}", f"--audit-log-path={self._audit}",
            "--audit-log-maxsize=4096",  # MiB; marks are positions in one file, so it must not be rotated
            # Without these three it waits 30 s and more for open watches before it stops.
            "--shutdown-watch-termination-grace-period=2s", "--request-timeout=10s",
            "--min-request-timeout=60", *self.api_server_flags,
        ]  # fmt: skip

    def _client_flags(self, user: str, port: int) -> list[str]:
        return [
            f"--kubeconfig={self.kubeconfig(user)}", "--bind-address=127.0.0.1", f"--secure-port={port}",
            f"--cert-dir={self.directory / str(port)}", "--leader-elect=false",
            "--kube-api-qps=500", "--kube-api-burst=1000",
        ]  # fmt: skip

    def _controller_manager_flags(self, port: int) -> list[str]:
        keys = self.ca.parent
        return [
            *self._client_flags(pki.CONTROLLER_MANAGER, port), "--controllers=*",
            "--use-service-account-credentials=true", f"--root-ca-file={self.ca}",
            f"--service-account-private-key-file={keys}/sa.key",
            f"--cluster-signing-cert-file={self.ca}", f"--cluster-signing-key-file={keys}/ca.key",
        ]  # fmt: skip


def _new_directory() -> tuple[Path, IO[bytes]]:
    """A directory of our own, and the file whose lock says that we live; those of killed runs are removed.

    It is in memory where there is a tmpfs: etcd writes a lot, and nothing of it is worth keeping.
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


def _write(event: dict[str, Any]) -> Write:
    ref, status = event.get("objectRef", {}), event.get("responseStatus", {})
    return Write(
        user=event["user"]["username"],
        verb=event["verb"],
        resource="/".join(filter(None, (ref.get("resource"), ref.get("subresource")))),
        namespace=ref.get("namespace", ""),
        name=ref.get("name", ""),
        code=status.get("code", 0),
        message=status.get("message", ""),
        uri=event["requestURI"],
        token="".join(event["user"].get("extra", {}).get(TOKEN_ID, [])),
        received=event["requestReceivedTimestamp"],
        answered=event["stageTimestamp"],
    )


def _condition(obj: Object, kind: str) -> bool:
    conditions = obj.get("status", {}).get("conditions") or []  # null until the first one is known
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
