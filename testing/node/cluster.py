"""A control plane and one node that runs pods, in the namespaces of ``python -m testing.node``."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from testing.child_process import free_ports, wait_until
from testing.kube import cluster
from testing.kube.api import Object
from testing.kube.process import Component
from testing.node import containerd, groups, inside
from testing.node.containerd import Containerd
from tools.kube import binaries

PROGRAMS = (
    *(program for program in cluster.PROGRAMS if program != "kwok"),
    *binaries.NODE,
)  # fmt: skip
NODE = "node-0"
KUBELET_ROOT = Path("/var/lib/kubelet")
_FILE_SYSTEMS = ("nodefs.available", "imagefs.available")
_DNS_ADDRESS = "10.96.0.10"
_COREFILE = f"""
.:53 {{
  bind {inside.ADDRESS}
  errors
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig %s
    ttl 1
  }}
  cache 1
}}
"""


class NodeCluster(cluster.Cluster):
    """etcd and the control plane, kubelet, containerd, kube-proxy and CoreDNS. It starts in about 10 s.

    ``images`` are archives. ``pause`` names the image that holds the namespaces of pods. Raises RuntimeError
    outside of a node's namespaces.
    """

    programs = PROGRAMS
    go = cluster.Cluster.go | {"GOMAXPROCS": str(os.cpu_count())}
    api_server_flags = (
        # Pods reach the API server at the bridge's address, by the Service that it maintains itself.
        "--bind-address=0.0.0.0", f"--advertise-address={inside.ADDRESS}",
        "--kubelet-preferred-address-types=InternalIP",
    )  # fmt: skip

    def __init__(self, *, pause: str, images: Sequence[Path] = (), crds: Sequence[Path] = ()) -> None:
        self.group = inside.group()
        """Control group of all pods, in each hierarchy."""
        if not self.group:
            raise RuntimeError("no node can run here: run `python -m testing.node COMMAND`")
        super().__init__(crds=crds, num_nodes=1)
        self._pause, self._images = pause, images

    # -- faults of a node

    def stop_kubelet(self) -> None:
        """Send SIGKILL. Pods keep running."""
        self.components["kubelet"].kill()

    def start_kubelet(self) -> None:
        self.components["kubelet"].start()

    def reboot(self) -> None:
        """Restart the node as after a power cut: memory is lost, and files on disk are kept."""
        for name in ("kubelet", "containerd"):
            self.components[name].kill()
        self._kill_pods()
        for path in (containerd.STATE, Path("/run/netns"), Path("/run/cni/addresses")):
            shutil.rmtree(path, ignore_errors=True)
        groups.remove(self.group, itself=False)
        self.components["containerd"].start()
        self.wait(self.containerd.is_serving, 60)
        self.start_kubelet()

    def set_capacity(self, resource: str, amount: int) -> None:
        """Set a resource of the node that no device plugin offers, such as GPUs that do not exist."""
        capacity = {"capacity": {resource: str(amount)}, "allocatable": {resource: str(amount)}}
        self.api.patch("v1/nodes", f"{NODE}/status", {"status": capacity})

    def kill_container(self, container_id: str) -> None:
        """Send SIGKILL to the container's processes. ``container_id`` is that of the pod's status."""
        task = container_id.rpartition("/")[2]
        self.containerd.ctr("task", "kill", "--all", "--signal", "SIGKILL", task)

    def enforce_network_policies(self) -> None:
        """Enforce policies from now on, within a second or two, like a CNI plugin that supports them."""
        log = self.directory / "policies.log"
        argv = [sys.executable, "-m", "testing.node.network_policies", str(self.kubeconfig())]
        component = self.components["policies"] = Component("the policy enforcer", argv, log)
        component.start()

    @property
    def containerd(self) -> Containerd:
        component = self.components["containerd"]
        assert isinstance(component, Containerd)
        return component

    # -- start and stop

    def _start_nodes(self) -> None:
        self._start_containerd()
        self.reached("images")
        (self.directory / "resolv.conf").touch()
        (self.directory / "kubelet.yaml").write_text(json.dumps(self._kubelet_configuration()))
        self._launch(
            "kubelet", f"--config={self.directory / 'kubelet.yaml'}", f"--kubeconfig={self.kubeconfig()}",
            f"--root-dir={KUBELET_ROOT}", f"--cert-dir={KUBELET_ROOT / 'pki'}", f"--node-ip={inside.ADDRESS}",
            f"--hostname-override={NODE}", "--v=2",
        )  # fmt: skip
        self._launch(
            "kube-proxy", f"--kubeconfig={self.kubeconfig()}", f"--hostname-override={NODE}",
            f"--cluster-cidr={inside.PODS}", "--proxy-mode=iptables",
            # The defaults of these flags limit the machine, not these namespaces.
            "--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
        )  # fmt: skip
        self._start_dns()

    def _start_containerd(self) -> None:
        runtime = Containerd(self.bin, self.directory / "containerd.log", self._pause)
        self.components["containerd"] = runtime
        runtime.start()
        self.wait(runtime.is_serving, 60)
        if runtime.forget_containers():
            runtime.stop()
            runtime.start()
            self.wait(runtime.is_serving, 60)
        for archive in self._images:
            runtime.import_image(archive)

    def _kubelet_configuration(self) -> Object:
        port, health_port = free_ports(2)
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "address": inside.ADDRESS, "port": port, "healthzPort": health_port,
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "containerRuntimeEndpoint": f"unix://{containerd.SOCKET}",
            "cgroupDriver": "cgroupfs", "cgroupRoot": f"/{self.group}", "failCgroupV1": False,
            "enforceNodeAllocatable": [], "oomScoreAdj": 0, "failSwapOn": False,
            "clusterDNS": [_DNS_ADDRESS], "clusterDomain": "cluster.local",
            "resolvConf": str(self.directory / "resolv.conf"), "makeIPTablesUtilChains": False,
            "volumePluginDir": str(KUBELET_ROOT / "volumeplugins"),
            # The disk belongs to the machine: its usage must not evict pods or images here.
            "evictionHard": {"memory.available": "100Mi", **dict.fromkeys(_FILE_SYSTEMS, "1%")},
            "imageGCHighThresholdPercent": 100,
            "syncFrequency": "5s", "nodeStatusUpdateFrequency": "2s", "maxPods": 60,
        }  # fmt: skip

    def _start_dns(self) -> None:
        """CoreDNS as a process of the node, behind the Service that pods use."""
        corefile = self.directory / "Corefile"
        corefile.write_text(_COREFILE % self.kubeconfig())
        self._launch("coredns", "-conf", str(corefile))
        ports = [{"name": protocol, "protocol": protocol.upper(), "port": 53} for protocol in ("udp", "tcp")]
        service = {"metadata": {"name": "kube-dns"}, "spec": {"clusterIP": _DNS_ADDRESS, "ports": ports}}
        self.api.create("v1/services", service, "kube-system")
        metadata = {"name": "kube-dns", "labels": {"kubernetes.io/service-name": "kube-dns"}}
        endpoints = [{"addresses": [inside.ADDRESS]}]
        slices = {"metadata": metadata, "addressType": "IPv4", "ports": ports, "endpoints": endpoints}
        self.api.create("discovery.k8s.io/v1/endpointslices", slices, "kube-system")

    def stop(self) -> None:
        """Stop the node. Pods are killed."""
        for name in ("kubelet", "containerd"):
            if component := self.components.pop(name, None):
                component.stop()
        self._kill_pods()
        super().stop()

    def _kill_pods(self) -> None:
        """Kill pods and their shims, which would report to nothing, and unmount their file systems."""

        def ended() -> bool:
            for process in _processes_of(self.group):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            return not list(_processes_of(self.group))

        wait_until(ended, timeout=60, what="the end of all containers")
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for path in reversed(mounts):
            if path.startswith((f"{KUBELET_ROOT}/", f"{containerd.STATE}/", "/run/netns/")):
                subprocess.run(["umount", "--lazy", path], capture_output=True)


def _processes_of(group: str) -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            is_pod = f"/{group}" in (entry / "cgroup").read_text()
            is_shim = (entry / "comm").read_text().startswith("containerd-shim")
            is_zombie = ") Z " in (entry / "stat").read_text()
            if (is_pod or is_shim) and not is_zombie:
                yield int(entry.name)
