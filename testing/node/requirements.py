"""Whether a node can run on this machine, and the reason if not."""

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
# Parts of a node's namespaces (`inside`), tried once.
_TRIAL = """
mount -t tmpfs tmpfs /run && mkdir /run/upper /run/work
mount -t overlay -o lowerdir=/var/lib,upperdir=/run/upper,workdir=/run/work overlay /var/lib
ip link add trial type bridge
iptables -t nat -L >/run/rules
"""


def missing_requirement() -> str:
    """The reason why no node can run, in one line. Empty if a node can run. Installs missing packages."""
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
        return f"control groups cannot be created here ({error})"
    finally:
        groups.remove(name)
    trial = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-ec", _TRIAL],
        capture_output=True, text=True,
    )  # fmt: skip
    return f"namespaces cannot be created here ({trial.stderr.strip()})" if trial.returncode else ""
