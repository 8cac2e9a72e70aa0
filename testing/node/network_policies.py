"""``python -m testing.node.network_policies KUBECONFIG``: enforces NetworkPolicies on the node's bridge.

It does the work of a CNI plugin with policies, by iptables and for ingress only. Unsupported rules (egress,
blocks of addresses, named ports) end it with a message, because a test must not pass with a rule that is not
enforced.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from testing.kube.api import Api, ApiError, Object

_CHAIN = "LMCACHE-POLICIES"
_INTERVAL_SECONDS = 1.0


def rules(policies: list[Object], pods: list[Object], namespaces: list[Object]) -> list[str]:
    """Rules of the policy chain for iptables-restore. Raises ValueError for unsupported policies."""
    labels = {space["metadata"]["name"]: _labels(space) for space in namespaces}
    pods = [pod for pod in pods if _address(pod)]
    allowed, isolated = [], set()
    for policy in policies:
        spec, namespace = policy["spec"], policy["metadata"]["namespace"]
        if spec.get("policyTypes", ["Ingress"]) != ["Ingress"]:
            raise ValueError(f"{policy['metadata']['name']}: only policies for ingress are enforced")
        here = [pod for pod in pods if pod["metadata"]["namespace"] == namespace]
        targets = [_address(pod) for pod in here if matches(spec["podSelector"], _labels(pod))]
        isolated.update(targets)
        for rule in spec.get("ingress") or []:
            sources = _sources(rule.get("from"), namespace, pods, labels)
            for target in targets:
                allowed += [
                    f"-A {_CHAIN} -d {target}{source}{port} -j RETURN"
                    for source in sources
                    for port in _ports(rule)
                ]
    known = f"-A {_CHAIN} -m conntrack --ctstate ESTABLISHED,RELATED -j RETURN"
    return [known, *allowed, *(f"-A {_CHAIN} -d {address} -j DROP" for address in sorted(isolated))]


def matches(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a label selector selects these labels."""
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    return all(_is_fulfilled(rule, labels) for rule in selector.get("matchExpressions") or [])


def _is_fulfilled(rule: Object, labels: dict[str, str]) -> bool:
    value, values = labels.get(rule["key"]), rule.get("values") or []
    results: dict[str, bool] = {
        "In": value in values,
        "NotIn": value not in values,
        "Exists": value is not None,
        "DoesNotExist": value is None,
    }
    return results[rule["operator"]]


def _sources(
    peers: list[Object] | None, namespace: str, pods: list[Object], labels: dict[str, dict[str, str]]
) -> list[str]:
    """Matches of iptables for the allowed sources. One match for all sources if the rule has no peers."""
    if not peers:
        return [""]
    matches_of_peers = set()
    for peer in peers:
        if "ipBlock" in peer:
            raise ValueError("blocks of addresses are not supported")
        for pod in pods:
            space = pod["metadata"]["namespace"]
            selector = peer.get("namespaceSelector")
            is_in_space = space == namespace if selector is None else matches(selector, labels[space])
            if is_in_space and matches(peer.get("podSelector") or {}, _labels(pod)):
                matches_of_peers.add(f" -s {_address(pod)}")
    return sorted(matches_of_peers)


def _ports(rule: Object) -> Iterator[str]:
    for port in rule.get("ports") or [{}]:
        protocol = f" -p {port.get('protocol', 'TCP').lower()}" if port else ""
        number = port.get("port")
        if not isinstance(number, int | None):
            raise ValueError("named ports are not supported")
        last = f":{port['endPort']}" if "endPort" in port else ""
        yield protocol if number is None else f"{protocol} --dport {number}{last}"


def _labels(obj: Object) -> dict[str, str]:
    return obj["metadata"].get("labels") or {}


def _address(pod: Object) -> str:
    """The pod's own address. Empty if it has none."""
    is_running = pod["status"].get("phase") == "Running" and not pod["spec"].get("hostNetwork")
    return pod["status"].get("podIP", "") if is_running else ""


def _enforce(api: Api) -> None:
    # Pods share one bridge: without this setting, packets between them bypass iptables.
    Path("/proc/sys/net/bridge/bridge-nf-call-iptables").write_text("1")
    # A former node of the same test session leaves its chain. The first rules replace the former ones.
    if subprocess.run(["iptables", "-w", "-n", "-L", _CHAIN], capture_output=True).returncode:
        subprocess.run(["iptables", "-w", "-N", _CHAIN], check=True)
        subprocess.run(["iptables", "-w", "-I", "FORWARD", "-j", _CHAIN], check=True)
    last: list[str] | None = None
    while True:
        kinds = ("networking.k8s.io/v1/networkpolicies", "v1/pods", "v1/namespaces")
        now = last
        with contextlib.suppress(ApiError, OSError):  # the API server is down: the known rules stay in force
            now = rules(*(api.objects(kind) for kind in kinds))
        if now is not None and now != last:
            text = "\n".join(["*filter", f":{_CHAIN} - [0:0]", *now, "COMMIT\n"])
            subprocess.run(["iptables-restore", "-w", "--noflush"], input=text, text=True, check=True)
            last = now
        time.sleep(_INTERVAL_SECONDS)


def main() -> None:
    config: Any = json.loads(Path(sys.argv[1]).read_text())
    (cluster,), (user,) = config["clusters"], config["users"]
    ca = Path(cluster["cluster"]["certificate-authority"])
    _enforce(Api(cluster["cluster"]["server"], ca, user["user"]["token"]))


if __name__ == "__main__":
    main()
