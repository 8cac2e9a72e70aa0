"""Checks of the features that the spec uses: claims and resizes need versions. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from lmcache_cli.commands.doctor.checks.installation import parse_version, version_of
from lmcache_cli.commands.doctor.facts import ClusterFacts, Facts
from lmcache_cli.commands.doctor.results import Result, failure, first_of, ok, unknown, warning
from lmcache_operator.api.autoscaling import AUTO
from lmcache_operator.components.engine.gpus import has_claim
from lmcache_operator.specs.merge import dig

_CLAIMS, _RESIZES = (1, 34), (1, 35)
_CLAIMS_WITHOUT_RESIZES = (1, 36)
"""Newest version of Kubernetes that refuses to resize pods with claims."""
_DRA_GROUP = "resource.k8s.io"


def uses_nodes(cluster: ClusterFacts) -> bool:
    """Whether a feature of the spec depends on the versions of the nodes."""
    parsed = cluster.parsed
    return bool(parsed and parsed.spec.autoscaling.mode == AUTO and parsed.spec.autoscaling.memory)


def gpu_claims(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check that the API server has claims, and the DeviceClass of the spec."""
    parsed, number = cluster.parsed, version_of(facts)
    if not parsed or not parsed.spec.engine or not has_claim(parsed):
        return
    remedy = "Install a DRA driver for your GPUs, or leave out spec.engine.gpu.deviceClassName."
    device_class = parsed.engine.gpu.device_class_name
    groups = {group.get("name") for group in facts.groups.object.get("groups") or ()}
    if number and number < _CLAIMS:
        upgrade = "Upgrade Kubernetes, or leave out spec.engine.gpu.deviceClassName."
        yield failure("GPU claims need Kubernetes 1.34.", upgrade)
    elif facts.groups.is_known and _DRA_GROUP not in groups:
        yield failure(f"The API server does not serve {_DRA_GROUP}.", remedy)
    elif cluster.device_class.is_missing:
        yield failure(f"There is no DeviceClass {device_class}.", remedy, "Unschedulable")
    elif not cluster.device_class.is_known:
        yield unknown(cluster.device_class)
    else:
        yield ok(f"The DeviceClass {device_class} exists.")


def resizes(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check that the memory tier of running pods can be resized, if autoscaling does so."""
    number, parsed = version_of(facts), cluster.parsed
    if not uses_nodes(cluster) or parsed is None:
        return
    remedy = "Upgrade Kubernetes. Until then, pods get a new size when they are replaced."
    resources = {item.get("name") for item in facts.core.object.get("resources") or ()}
    if number and number < _RESIZES:
        yield warning("Resizing running pods needs Kubernetes 1.35.", remedy)
    elif facts.core.is_known and "pods/resize" not in resources:
        text = "The API server does not serve pods/resize."
        yield failure(text, "Turn on the feature gate InPlacePodVerticalScaling.", "ResizeInfeasible")
    elif parsed.spec.engine and has_claim(parsed) and number and number <= _CLAIMS_WITHOUT_RESIZES:
        text = "This version of Kubernetes does not resize pods with GPU claims."
        yield warning(text, remedy, "ResizeInfeasible")
    elif old := _old_nodes(cluster):
        text = f"Resizing running pods needs a kubelet 1.35. Older: {first_of(old)}."
        yield warning(text, "Upgrade the nodes.", "ResizeInfeasible")
    else:
        unread = [unknown(answer) for answer in cluster.nodes.values() if not answer.is_known]
        yield from unread[:1] or [ok("Kubernetes can resize running pods.")]


def _old_nodes(cluster: ClusterFacts) -> list[str]:
    """Return the nodes whose kubelet cannot resize running pods."""
    old = []
    for name, answer in cluster.nodes.items():
        text = str(dig(answer.object, "status", "nodeInfo", "kubeletVersion") or "")
        if (number := parse_version(text)) and number < _RESIZES:
            old.append(f"node {name} has {text}")
    return old
