"""Everything that checks read: answers of the API server, sidecars and engines. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import NamedTuple

from lmcache_cli.commands.doctor.answers import ApiAnswer
from lmcache_cli.commands.gather import PodFigures
from lmcache_operator.api.parse import Cluster, parse
from lmcache_operator.components.registry import COMPONENTS
from lmcache_operator.contract.base import Context
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.pods.pods import is_ready
from lmcache_operator.specs import Object, names
from lmcache_operator.specs.merge import dig

NO_ANSWER = ApiAnswer()
SYSTEM_NAMESPACE = "lmcache-system"
"""Namespace in which the documentation installs the operator."""
CHART = "charts/lmcache-operator"
"""The chart in a checkout. No release is published."""
RELEASE = "meta.helm.sh/release-name"
"""Annotation of Helm on all objects of a release."""
_PLACE = "meta.helm.sh/release-namespace"
NAME = re.compile(r"[a-z0-9][-a-z0-9.]*")
"""Text that a command line may contain as it is. Tenants can label a Deployment of theirs as an operator."""


class Right(NamedTuple):
    """A right to make one kind of request."""

    verb: str
    group: str
    """API group; empty: the core API."""
    resource: str
    """Plural of the kind, with a subresource if there is one, such as pods/proxy."""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}{'.' if self.group else ''}{self.group}"

    @property
    def attributes(self) -> dict[str, str]:
        """Attributes of an access review."""
        plural, _, subresource = self.resource.partition("/")
        named = {"verb": self.verb, "group": self.group, "resource": plural}
        return named | ({"subresource": subresource} if subresource else {})


class PodTrial(NamedTuple):
    """The API server's answer to the creation of a pod, as a dry run."""

    component: str
    answer: ApiAnswer
    """Unknown if the API server did not decide."""
    refusal: str = ""
    """Why the API server refuses the pod; empty: it admits the pod."""
    warnings: Sequence[str] = ()
    num_missing: int = 1
    """Pods of the component that its controller has not created."""


@dataclass(frozen=True)
class ClusterFacts:
    """One LMCacheCluster with its pods."""

    resource: Object
    pods: Sequence[PodFigures] = ()
    """Engine pods and pods with the cache injected, with /stats of their sidecars."""
    shard_pods: Sequence[Object] = ()
    engines: Sequence[PodFigures] = ()
    """Some of the pods, with ``version`` and ``cache`` of the engine in place of /stats."""
    trials: Sequence[PodTrial] = ()
    device_class: ApiAnswer = NO_ANSWER
    """DeviceClass that the spec names."""
    nodes: Mapping[str, ApiAnswer] = field(default_factory=dict)
    """Some nodes of the pods, by name. They are read only if a feature depends on the node."""

    @property
    def unready_pods(self) -> list[Object]:
        """Pods that are not ready, without those that are terminating."""
        pods = [figures.pod for figures in self.pods]
        return [pod for pod in pods if not is_ready(pod) and "deletionTimestamp" not in pod["metadata"]]

    @property
    def name(self) -> str:
        """Name of the cluster."""
        return str(self.resource["metadata"]["name"])

    @cached_property
    def parsed(self) -> Cluster | None:
        """The cluster's typed spec; None if the spec is invalid."""
        try:
            return parse(self.resource)
        except InvalidSpecError:
            return None

    @cached_property
    def invalid_spec(self) -> str:
        """Why the spec is invalid; empty: it is valid."""
        try:
            self.render()
        except InvalidSpecError as error:
            return str(error)
        return ""

    def render(self) -> list[Object]:
        """Return the objects that the operator creates for the cluster. Raises InvalidSpecError."""
        cluster, context = parse(self.resource), Context(names.STOCK_IMAGES)
        return [child for component in COMPONENTS for child in component.render(cluster, context)]

    @cached_property
    def stateful_sets(self) -> dict[str, Object]:
        """The StatefulSets of the spec by component; empty if the spec is invalid."""
        if self.invalid_spec:
            return {}
        rendered = (child for child in self.render() if child["kind"] == "StatefulSet")
        return {child["metadata"]["labels"][names.COMPONENT_LABEL]: child for child in rendered}


@dataclass(frozen=True)
class Facts:
    """Everything that was read for one run."""

    namespace: str
    context: str = ""
    """Context of the kubeconfig; empty in a pod."""
    options: str = ""
    """Options of kubectl that the user's commands need to reach the same API server, each after a space."""
    now: float = 0.0
    """User's clock, in seconds since 1970."""
    version: ApiAnswer = NO_ANSWER
    core: ApiAnswer = NO_ANSWER
    """Resources of the core API."""
    groups: ApiAnswer = NO_ANSWER
    """API groups."""
    definitions: Mapping[str, ApiAnswer] = field(default_factory=dict)
    """CustomResourceDefinitions by name."""
    namespace_object: ApiAnswer = NO_ANSWER
    operators: ApiAnswer = NO_ANSWER
    """Deployments of the operator."""
    operator_pods: ApiAnswer = NO_ANSWER
    """Pods of the first operator."""
    policies: ApiAnswer = NO_ANSWER
    """MutatingAdmissionPolicies."""
    bindings: ApiAnswer = NO_ANSWER
    profiles: ApiAnswer = NO_ANSWER
    listed_clusters: ApiAnswer = NO_ANSWER
    """All clusters of the namespace, or the one that the user names."""
    cluster_pods: ApiAnswer = NO_ANSWER
    """Pods of the operator's StatefulSets."""
    injected_pods: ApiAnswer = NO_ANSWER
    """Pods with the label for injection."""
    user: ApiAnswer = NO_ANSWER
    """SelfSubjectReview with the name of the user."""
    user_rights: Mapping[Right, bool | None] = field(default_factory=dict)
    """Rights of the user; None: unknown."""
    operator_rights: Mapping[Right, bool | None] = field(default_factory=dict)
    """Rights of the operator's ServiceAccount in the namespace; None: unknown."""
    operator_rights_problem: ApiAnswer = NO_ANSWER
    """Why the rights of the operator are unknown."""
    api_offset_seconds: float | None = None
    """Clock of the API server minus the clock of the user; None: unknown."""
    clusters: Sequence[ClusterFacts] = ()
    has_one_cluster: bool = False
    """Whether the user named a cluster, so that the others were not read."""
    unanswered: Mapping[str, str] = field(default_factory=dict)
    """Reads that the API server did not answer, or with an error of its own: path and reason."""

    @property
    def server_time(self) -> datetime:
        """Present time on the clock of the API server."""
        return datetime.fromtimestamp(self.now + (self.api_offset_seconds or 0.0), UTC)

    @property
    def has_ready_operator(self) -> bool:
        """Whether a pod of an operator is ready; True if the operators are unknown."""
        return not self.operators.items or any(
            dig(each, "status", "readyReplicas") for each in self.operators.items
        )

    @property
    def where(self) -> str:
        """Name of the Kubernetes cluster, for messages."""
        return (
            f"the Kubernetes cluster of context {self.context}" if self.context else "this Kubernetes cluster"
        )

    def kubectl(self, words: str, namespace: str | None = None) -> str:
        """Return a command line of kubectl in a namespace; None: the user's; empty: none."""
        chosen = self.namespace if namespace is None else namespace
        return f"kubectl{self.options}{chosen and f' -n {chosen}'} {words}"

    def helm(self, verb: str, more: str = "") -> str:
        """Return a command line of Helm that installs or upgrades the release of the operator.

        The release is that of the Deployment. Without one, it is that of CRDs which an earlier release kept.
        """
        live = [*self.operators.items, *(answer.object for answer in self.definitions.values())]
        annotations = (dig(each, "metadata", "annotations") or {} for each in live)
        releases = ((each.get(RELEASE, ""), each.get(_PLACE, SYSTEM_NAMESPACE)) for each in annotations)
        valid = (each for each in releases if all(map(NAME.fullmatch, each)))
        name, namespace = next(valid, ("lmcache", SYSTEM_NAMESPACE))
        options = self.options.replace(" --context", " --kube-context")
        return f"helm{options} {verb} {name} {CHART} -n {namespace} {more}"
