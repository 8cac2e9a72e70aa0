"""Whether a node can run on this machine, and if not, why."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from testing.node import groups

COMMANDS = ("runc", "iptables", "conntrack", "ip", "unshare", "setpriv", "mount")
CNI_PLUGINS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
# What the namespaces of a node are made of (`inside`), tried once.
_TRIAL = """
mount -t tmpfs tmpfs /run && mkdir /run/upper /run/work
mount -t overlay -o lowerdir=/var/lib,upperdir=/run/upper,workdir=/run/work overlay /var/lib
ip link add trial type bridge
iptables -t nat -L >/run/rules
"""


def cni_plugins() -> Path | None:
    """The directory of the CNI plugins, where they are installed."""
    return next((path for path in CNI_PLUGINS if (path / "bridge").exists()), None)


def what_is_missing() -> str:
    """One line, empty when a node can run."""
    if os.getuid():
        return "it needs root"
    absent = [command for command in COMMANDS if shutil.which(command) is None]
    if not cni_plugins():
        absent.append("CNI plugins")
    if absent:
        return f"not installed: {', '.join(absent)} (tools/setup.sh node installs them)"
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
