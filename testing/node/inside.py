"""The first process in a node's namespaces, started by ``__main__``. It prepares the namespaces, runs a
command, and reaps the orphans of containers. All processes in the namespaces end with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from testing.node import groups

CACHED, TEMPORARY = ("containerd",), ("kubelet",)
"""Directories on the node's disk that are mounted under /var/lib: cached between runs, removed after each."""
ADDRESS, PODS, SERVICES = "10.88.0.1", "10.88.0.0/16", "10.96.0.0/16"
BRIDGE = "cni0"
_GROUP = "LMCACHE_NODE_GROUP"
# The node has the bridge's address, which must exist before the kubelet starts. Packets to Services must
# leave by some interface, and the bridge is the only one.
_NETWORK = f"""
ip link set lo up
ip link add {BRIDGE} type bridge
ip addr add {ADDRESS}/16 dev {BRIDGE}
ip link set {BRIDGE} up
ip route add {SERVICES} dev {BRIDGE}
echo 1 >/proc/sys/net/ipv4/ip_forward
"""
_MOUNTS = """
for directory in /run /dev/shm /var/log; do mount -t tmpfs tmpfs $directory; done
mkdir /run/upper /run/work
mount -t overlay -o lowerdir=/var/lib,upperdir=/run/upper,workdir=/run/work overlay /var/lib
for path in "$@"; do
  mkdir -p "/var/lib/$(basename "$path")"
  mount --bind "$path" "/var/lib/$(basename "$path")"
done
"""


def group() -> str:
    """The control group of pods in these namespaces. Empty if no node can run here."""
    return os.environ.get(_GROUP, "")


def main() -> int:
    disk, name, *command = sys.argv[1:]
    signal.signal(signal.SIGINT, lambda *_: None)  # only the command handles it
    paths = [str(Path(disk) / name) for name in (*CACHED, *TEMPORARY)]
    subprocess.run(["sh", "-ec", _MOUNTS + _NETWORK, "sh", *paths], check=True)
    process = subprocess.Popen(command, env={**os.environ, _GROUP: name})
    while True:
        ended, status = os.wait()
        if ended == process.pid:
            groups.remove(name, itself=False)
            return os.waitstatus_to_exitcode(status) % 256


if __name__ == "__main__":
    sys.exit(main())
