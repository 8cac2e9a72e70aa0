"""kubectl for pods without processes: the real one, but for commands that need a running container.

``port-forward``, ``exec``, ``logs`` and most of ``wait`` only check that everything they name exists.
``get --watch`` ends when the object is Ready, as a reader ends it. A path in ``-o jsonpath`` must be a field
of the custom resource: for another path, kubectl itself prints nothing.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

FACTS = json.loads(Path(os.environ["KUBECTL_FACTS"]).read_text())
KUBECTL = os.environ["REAL_KUBECTL"]
_OURS = ("lmcluster", "lmcacheclusters")


def fail(message: str) -> NoReturn:
    sys.exit(f"kubectl {' '.join(sys.argv[1:])}: {message}")


def get(name: str) -> Any:
    """The object of ``pod/x`` or ``x``, a pod."""
    kind, _, name = name.rpartition("/")
    namespace = [part for flag in ("-n", "--namespace") if (part := option(flag))]
    flags = [f"--namespace={namespace[0]}"] if namespace else []
    done = subprocess.run(
        [KUBECTL, "get", kind or "pod", name, *flags, "-o", "json"], capture_output=True, text=True
    )
    if done.returncode:
        fail(done.stderr)
    return json.loads(done.stdout)


def option(name: str) -> str:
    """The value of ``-c x`` or ``--c=x``; empty if it is absent."""
    for argument, following in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
        if argument == name:
            return following
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return ""


def containers(pod: Any) -> list[Any]:
    spec = pod["spec"]
    all_containers: list[Any] = [*spec["containers"], *spec.get("initContainers", ())]
    return all_containers


def check_container(pod: Any) -> None:
    if (name := option("-c")) and name not in {container["name"] for container in containers(pod)}:
        fail(f"no container {name}")


def port_forward(target: str, *ports: str) -> None:
    target_object = get(target)
    if target_object["kind"] == "Service":
        open_ports = {port["port"] for port in target_object["spec"]["ports"]}
    else:
        open_ports = {
            port["containerPort"]
            for container in containers(target_object)
            for port in container.get("ports", ())
        }
    if missing := {int(port) for port in ports if port.isdigit()} - open_ports:
        fail(f"no port {missing}, but {open_ports}")
    for address in ("127.0.0.1", "[::1]"):
        print(f"Forwarding from {address}:{ports[0]} -> {ports[0]}")


def wait(target: str) -> None:
    condition = option("--for").removeprefix("condition=").partition("=")[0]
    kind = get(target)["kind"]
    if kind == "LMCacheCluster":
        if condition not in FACTS["conditions"]:
            fail(f"no condition {condition}")
    elif condition != "Ready":
        fail(f"{kind} has no condition {condition}")
    group = "lmcachecluster.lmcache.io" if kind == "LMCacheCluster" else kind.lower()
    print(f"{group}/{target.partition('/')[2]} condition met")


def watch() -> None:
    watching = subprocess.Popen([KUBECTL, *sys.argv[1:]], stdout=subprocess.PIPE, text=True)
    assert watching.stdout
    for line in watching.stdout:
        print(line, end="")
        if "Ready" in line.split():
            break
    watching.kill()


def check_paths(kind: str) -> None:
    expression = option("-o").removeprefix("jsonpath=")
    for chosen in re.findall(r'@\.type=="(\w+)"', expression):
        if chosen not in FACTS["conditions"]:
            fail(f"no condition {chosen}")
    for path in re.findall(r"\{\.([^}]+)\}", re.sub(r"\[.*?\]", "", expression)):
        if kind in _OURS and path.rstrip(".") not in {*FACTS["fields"], "metadata.uid"}:
            fail(f"no field {path}")


def main() -> None:
    arguments = sys.argv[1:]
    command, *rest = [part for part in arguments if part != "-n" and part != option("-n")]
    if command == "port-forward":
        port_forward(*rest)
    elif command == "exec":
        check_container(get(rest[0]))
    elif command == "logs":
        check_container(get(rest[0]))
        print(FACTS["logs"])
    elif command == "wait" and (rest[0].startswith("pod/") or "--for=condition=Ready" not in rest):
        wait(rest[0])
    elif "--watch" in rest:
        watch()
    else:
        if command == "get" and "jsonpath" in option("-o"):
            check_paths(rest[0])
        os.execv(KUBECTL, [KUBECTL, *arguments])


if __name__ == "__main__":
    main()
