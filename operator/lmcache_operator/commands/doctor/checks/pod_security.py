"""Checks the Pod Security level of the namespace against the pods of the spec. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from lmcache_operator.commands.doctor.facts import ClusterFacts, Facts
from lmcache_operator.commands.doctor.results import Result, failure, ok, unknown
from lmcache_operator.specs import Object
from lmcache_operator.specs.merge import dig

_LABEL = "pod-security.kubernetes.io/enforce"
_HOST = ("hostNetwork", "hostPID", "hostIPC")
_BASELINE_CAPABILITIES = frozenset((
    "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE",
    "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
))  # fmt: skip
_VOLUMES = frozenset((
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected",
    "secret",
))  # fmt: skip
"""Types of volumes that the level "restricted" allows."""


def pod_security(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check that the namespace's Pod Security level admits the pods of the spec."""
    name = "podSecurity"
    if not facts.namespace_object.is_known:
        yield unknown(name, facts.namespace_object)
        return
    labels = dig(facts.namespace_object.object, "metadata", "labels") or {}
    level = labels.get(_LABEL, "privileged")
    for component, stateful_set in cluster.stateful_sets.items():
        pod = stateful_set["spec"]["template"]["spec"]
        violations = [*violated(pod, level)]
        if violations:
            text = f"Pod Security level {level} refuses pods of component {component}: {violations[0]}."
            remedy = f"Change spec.{component}, or the label {_LABEL} of namespace {facts.namespace}."
            yield failure(name, text, remedy, "FailedCreate")
        else:
            yield ok(name, f"Pod Security level {level} admits pods of component {component}.")


def violated(pod: Object, level: str) -> Iterator[str]:
    """Yield why a Pod Security level refuses the spec of a pod. See the Pod Security Standards."""
    if level in ("baseline", "restricted"):
        yield from _baseline(pod)
    if level == "restricted":
        yield from _restricted(pod)


def _containers(pod: Object) -> Iterator[Object]:
    return chain(pod.get("initContainers") or (), pod.get("containers") or ())


def _baseline(pod: Object) -> Iterator[str]:
    yield from (f"{field} is true" for field in _HOST if pod.get(field))
    for volume in pod.get("volumes") or ():
        if volume.get("hostPath") is not None:
            yield f"volume {volume['name']} is a hostPath"
    for container in _containers(pod):
        where, security = f"container {container['name']}", container.get("securityContext") or {}
        if security.get("privileged"):
            yield f"{where} is privileged"
        added = set(dig(security, "capabilities", "add") or ()) - _BASELINE_CAPABILITIES
        yield from (f"{where} adds capability {capability}" for capability in sorted(added))
        yield from (
            f"{where} has a hostPort" for port in container.get("ports") or () if port.get("hostPort")
        )
        if dig(security, "seccompProfile", "type") == "Unconfined":
            yield f"{where} has seccompProfile Unconfined"


def _restricted(pod: Object) -> Iterator[str]:
    shared = pod.get("securityContext") or {}
    for volume in pod.get("volumes") or ():
        if kinds := volume.keys() - _VOLUMES - {"name"}:
            yield f"volume {volume['name']} is a {min(kinds)}"
    for container in _containers(pod):
        where, security = f"container {container['name']}", container.get("securityContext") or {}
        if security.get("allowPrivilegeEscalation") is not False:
            yield f"{where} does not set allowPrivilegeEscalation to false"
        if "ALL" not in (dig(security, "capabilities", "drop") or ()):
            yield f"{where} does not drop all capabilities"
        added = set(dig(security, "capabilities", "add") or ()) - {"NET_BIND_SERVICE"}
        yield from (f"{where} adds capability {capability}" for capability in sorted(added))
        if security.get("runAsNonRoot", shared.get("runAsNonRoot")) is not True:
            yield f"{where} does not set runAsNonRoot"
        if security.get("runAsUser", shared.get("runAsUser")) == 0:
            yield f"{where} runs as user 0"
        profile = dig(security, "seccompProfile", "type") or dig(shared, "seccompProfile", "type")
        if profile not in ("RuntimeDefault", "Localhost"):
            yield f"{where} has no seccompProfile"
