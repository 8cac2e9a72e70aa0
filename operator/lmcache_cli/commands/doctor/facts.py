"""Everything that checks read: answers of the API server, sidecars and engines. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from lmcache_cli.commands.doctor.answers import ApiAnswer
from lmcache_cli.commands.gather import PodFigures
from lmcache_operator.api.parse import Cluster, parse
from lmcache_operator.components.registry import COMPONENTS
from lmcache_operator.contract.base import Context
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs import Object, names

NO_ANSWER = ApiAnswer()


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
    lacks_pods: bool = True
    """Whether pods of the component are missing."""


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
    now: float = 0.0
    """User's clock, in seconds since 1970."""
    version: ApiAnswer = NO_ANSWER
    core: ApiAnswer = NO_ANSWER
    """Resources of the core API."""
    groups: ApiAnswer = NO_ANSWER
    """API groups."""
    definitions: Mapping[str, ApiAnswer] = field(default_factory=dict)
    """CustomResourceDefinitions by name."""
    operators: ApiAnswer = NO_ANSWER
    """Deployments of the operator."""
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
