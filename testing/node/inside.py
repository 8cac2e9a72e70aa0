"""The first process in a node's namespaces (``__main__`` starts it): it prepares them, runs a command, and
reaps what containers leave to it. All that runs in there ends with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from testing.node import groups

KEPT, THROWN_AWAY = ("containerd",), ("kubelet",)
"""Directories on the node's disk, which lie under /var/lib in the namespaces; between runs."""
ADDRESS, PODS, SERVICES = "10.88.0.1", "10.88.0.0/16", "10.96.0.0/16"
BRIDGE = "cni0"
_GROUP = "LMCACHE_NODE_GROUP"
# The node's address is the bridge's, and is there before the kubelet starts. What goes to Services has to
# leave by some interface, and there is no other.
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
    """The control group, in each hierarchy, of the pods here; empty where no node can run."""
    return os.environ.get(_GROUP, "")


def main() -> int:
    disk, name, *command = sys.argv[1:]
    signal.signal(signal.SIGINT, lambda *_: None)  # it is the command's
    paths = [str(Path(disk) / name) for name in (*KEPT, *THROWN_AWAY)]
    subprocess.run(["sh", "-ec", _MOUNTS + _NETWORK, "sh", *paths], check=True)
    process = subprocess.Popen(command, env={**os.environ, _GROUP: name})
    while True:
        ended, status = os.wait()
        if ended == process.pid:
            groups.remove(name, itself=False)
            return os.waitstatus_to_exitcode(status) % 256


if __name__ == "__main__":
    sys.exit(main())
