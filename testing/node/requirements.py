"""Whether a node can run on this machine, and if not, why."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from testing.node import groups
from tools import debian

CNI_PLUGINS = Path("/usr/lib/cni")
_PACKAGES = {
    "conntrack": "conntrack",
    "ip": "iproute2",
    "iptables": "iptables",
    "runc": "runc",
    "setpriv": "util-linux",
    str(CNI_PLUGINS / "bridge"): "containernetworking-plugins",
}
# What the namespaces of a node are made of (`inside`), tried once.
_TRIAL = """
mount -t tmpfs tmpfs /run && mkdir /run/upper /run/work
mount -t overlay -o lowerdir=/var/lib,upperdir=/run/upper,workdir=/run/work overlay /var/lib
ip link add trial type bridge
iptables -t nat -L >/run/rules
"""


def what_is_missing() -> str:
    """Why no node can run, in a line; empty when one can. Installs packages that are missing."""
    if os.getuid():
        return "it needs root"
    try:
        debian.install(_PACKAGES)
    except debian.PackagesError as error:
        return str(error)
    name = f"lmcache-trial-{os.getpid()}"
    try:
        groups.make(name)
    except OSError as error:
        return f"no control groups can be made here ({error})"
    finally:
        groups.remove(name)
    trial = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-ec", _TRIAL],
        capture_output=True, text=True,
    )  # fmt: skip
    return f"no namespaces of our own ({trial.stderr.strip()})" if trial.returncode else ""
