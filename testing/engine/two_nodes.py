"""``vllm serve`` over two nodes of this machine, which only TCP connects.

A node has network devices and a /dev/shm of its own (namespaces). The folders of sidecars are the same inside
and outside of it. Only root may create such nodes.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from testing.child_process import ChildProcess, answers, wait_until
from testing.engine.namespaces import enter
from testing.engine.process import ServedEngine

if TYPE_CHECKING:
    from typing import Self  # Python 3.11

P = ParamSpec("P")
T = TypeVar("T")

DEVICE = "eth0"
_NOWHERE = "02:00:00:00:00:01"
"""Hardware address that no device has."""
_NAMESPACES = ("setpriv", "--pdeathsig", "KILL", "--", "unshare", "--net", "--mount")
_HOLD = """
exec 3<"$1"
mount -t tmpfs -o size=1g tmpfs /dev/shm
mkdir "$1"
mount --no-canonicalize --bind /proc/self/fd/3 "$1"
ip link set lo up
echo ready
exec sleep infinity 3<&-
"""
_master_ports = itertools.count(29501)
"""Ports of vLLM's rendezvous. No other process uses the network of a node."""


def are_allowed() -> bool:
    """Whether this process can create nodes."""
    has_programs = all(map(shutil.which, ("ip", "nsenter", "setpriv", "unshare")))
    return has_programs and not subprocess.run([*_NAMESPACES, "true"], capture_output=True).returncode


class Node(ChildProcess):
    """A process that holds the namespaces of a node."""

    def __init__(self, number: int, log: Path, shared: Path) -> None:
        """``shared``: the folder in /dev/shm that the node shares with this process."""
        super().__init__(f"node {number}", log)
        self.address = f"10.77.0.{number + 1}"
        self._shared = shared

    def start(self) -> None:
        self.spawn([*_NAMESPACES, "sh", "-ec", _HOLD, "sh", self._shared])

        def is_ready() -> bool:
            self.check()
            return "ready" in self.log

        wait_until(is_ready, what=self.name)

    def ip(self, *arguments: str) -> None:
        """Run ``ip`` in the node's network."""
        argv = ["nsenter", f"--target={self.pid}", "--net", "ip", *arguments]
        subprocess.run(argv, check=True, capture_output=True)


class TwoNodes:
    """Two nodes and their link. A context manager."""

    def __init__(self, folder: Path, shared: Sequence[Path]) -> None:
        """``folder`` gets the logs. ``shared``: the folder of each node in /dev/shm."""
        self.nodes = [Node(n, folder / f"node-{n}.log", path) for n, path in enumerate(shared)]
        self._callers: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        try:
            for node in self.nodes:
                node.start()
            leader, follower = self.nodes
            peer = ("peer", "name", DEVICE, "netns", str(follower.pid))
            leader.ip("link", "add", DEVICE, "type", "veth", *peer)
            for node in self.nodes:
                node.ip("addr", "add", f"{node.address}/24", "dev", DEVICE)
                node.ip("link", "set", DEVICE, "up")
            self._callers = ThreadPoolExecutor(16, "leader's network", enter, (leader.pid,))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call the function on a thread in the leader's network."""
        assert self._callers is not None
        return self._callers.submit(function, *args, **kwargs)

    def cut(self) -> None:
        """Lose all packets between the nodes. Neither side notices."""
        for node, other in zip(self.nodes, reversed(self.nodes), strict=True):
            neighbor = (other.address, "lladdr", _NOWHERE, "dev", DEVICE, "nud", "permanent")
            node.ip("neigh", "replace", *neighbor)

    def heal(self) -> None:
        for node, other in zip(self.nodes, reversed(self.nodes), strict=True):
            node.ip("neigh", "del", other.address, "dev", DEVICE)

    def close(self) -> None:
        if self._callers is not None:
            self._callers.shutdown()
        for node in self.nodes:
            node.close()


class TwoNodeEngine:
    """One ``vllm serve`` of the tiny model with a rank per node: the leader, and the headless follower."""

    def __init__(
        self,
        nodes: TwoNodes,
        folder: Path,
        connectors: Sequence[dict[str, Any] | None],
        *args: str,
        environments: Sequence[Mapping[str, str]] = ({}, {}),
        model: Path | None = None,
    ) -> None:
        """``connectors`` and ``environments`` are those of each node. See ``ServedEngine``."""
        self._nodes = nodes
        self.parts: list[ServedEngine] = []
        port = next(_master_ports)
        group = [f"--master-addr={nodes.nodes[0].address}", f"--master-port={port}", "--nnodes=2"]
        for rank, node in enumerate(nodes.nodes):
            network = {"VLLM_HOST_IP": node.address, "GLOO_SOCKET_IFNAME": DEVICE}
            headless = ["--headless"] if rank else []
            part = ServedEngine(
                folder / f"engine-{rank}.log",
                8000,
                connectors[rank],
                *("--distributed-executor-backend=mp", *group, f"--node-rank={rank}", *headless, *args),
                environment={**network, **environments[rank]},
                model=model,
                node=node.pid,
            )
            self.parts.append(part)

    @property
    def leader(self) -> ServedEngine:
        """The part with the API server. Call it by ``TwoNodes.submit``."""
        return self.parts[0]

    def wait_ready(self) -> TwoNodeEngine:
        """Wait until the leader accepts requests."""

        def is_ready() -> bool:
            for part in self.parts:
                part.check()
            return self._nodes.submit(answers, f"{self.leader.url}/health").result()

        wait_until(is_ready, timeout=300, what="vllm serve over two nodes")
        return self

    def close(self) -> None:
        """End both parts as the kubelet would, and kill the processes that are left."""
        for ending in [self._nodes.submit(part.close) for part in self.parts]:
            ending.result()
