"""The contract of a component, which is one part of every cluster, such as its engine pods.

A component renders objects from the spec, plans steps from observations, and reports its status. It is pure,
without client, clock or state, so ``render`` prints what ``run`` applies. Only PodGroups are missing there,
because they depend on the API server. The reconciler observes, applies and merges conditions in the same way
for all components.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from lmcache_operator.api.engine_kinds import ENGINE_KINDS, VLLM
from lmcache_operator.api.parse import Cluster, Platform
from lmcache_operator.contract.conditions import Condition, Event, Problem
from lmcache_operator.policy.report import Report
from lmcache_operator.specs import Images, Object
from lmcache_operator.specs.kinds import Ref
from lmcache_operator.specs.names import ENGINE, ROUTER_IMAGE, SHARD_IMAGE, object_name
from lmcache_operator.specs.ownership import Path

OTHER_ENGINES: Images = {kind.name: kind.image for kind in ENGINE_KINDS.values() if kind != VLLM}
"""Default images of engines that are not of the default kind, by kind."""


class Context(NamedTuple):
    """Settings of the operator that shape a cluster's objects."""

    images: Images
    """Default images by container. That of the engine has the default kind."""
    operator_namespace: str = ""
    """Namespace of the operator that may reach the sidecars' metrics port; empty: none."""
    allow_all_gpus: bool = False
    """Whether sidecars may see all GPUs of their nodes, including those of other pods."""
    shard_image: str = SHARD_IMAGE
    """Default image of the servers of a managed remote tier."""
    engine_images: Images = OTHER_ENGINES
    """Default images of the other kinds of engines, by kind."""
    router_image: str = ROUTER_IMAGE
    """Default image of routers."""
    platform: Platform = Platform()

    def images_for(self, cluster: Cluster) -> Images:
        """Default images of a cluster's containers. The cluster must have an engine."""
        image = self.engine_images.get(cluster.engine.kind, self.images[ENGINE])
        return self.images | {ENGINE: image}


class LookupFigures(NamedTuple):
    """A sidecar's counters since it started."""

    tokens: int = 0
    """Looked-up tokens."""
    hit_tokens: Mapping[str, int] = MappingProxyType({})
    """Tokens of hits by tier. The tier ``engine`` is the engine's own prefix cache."""


class SidecarState(NamedTuple):
    """State of the sidecar of a running pod, as the sidecar reports it."""

    pod: str = ""
    is_engine_ready: bool = False
    """Whether the pod is Ready."""
    answers: bool = True
    reason: str = ""
    """Why the sidecar is not ready; empty: it is ready."""
    is_attached: bool = False
    """Whether its engine is connected and uses it."""
    attach_refusal: str = ""
    """Why the sidecar refuses an engine that tries to attach; empty: it refuses none."""
    lookups: LookupFigures = LookupFigures()
    transfer: str = ""
    """CudaIPC (the sidecar copies KV) or SharedMemory (the engine copies); empty: no engine, or unknown."""
    transfer_reason: str = ""
    """Why the transfer is this one."""
    memory_bytes: int | None = None
    """Present size of the memory tier; None: the sidecar cannot resize, or unknown."""
    memory_target: int = 0
    """Size in bytes that the sidecar resizes its memory tier to."""
    resize_problem: str = ""
    """Why the memory tier does not have its target size."""
    features: Mapping[str, Any] = MappingProxyType({})
    """Report on each feature of the pod, by name. ``PodFeature.report`` knows its type."""


class Resize(NamedTuple):
    """One step in the resize of a running pod's memory tier."""

    pod: Object
    num_bytes: int
    """Final size of the memory tier."""
    annotations: Mapping[str, str] | None = None
    """New value of all annotations that the operator owns on the pod; None: unchanged."""
    memory: Mapping[str, Any] | None = None
    """New limits and requests of the sidecar's container; None: unchanged."""
    sidecar_bytes: int | None = None
    """Limit on the sidecar's reported size and target, a precondition of this step; None: no precondition."""
    is_start: bool = False
    """Whether this step starts the growth of a pod."""


class Probed(NamedTuple):
    """Reports of the sidecars of a cluster."""

    sidecars: tuple[SidecarState, ...]
    is_certain: bool
    """False: a sidecar missed one answer and may answer at the next probe."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """A cluster, and the present state of one of its components."""

    resource: Object
    """The LMCacheCluster as the API server stores it."""
    children: Mapping[Ref, Object] = field(default_factory=dict)
    """Objects of the component that the cluster owns."""
    taken: frozenset[Ref] = frozenset()
    """Names of children that belong to existing objects of other owners. The spec may not need them."""
    pods: tuple[Object, ...] = ()
    """Pods of the component's StatefulSets."""
    foreign_pods: tuple[Object, ...] = ()
    """Pods of other owners, selected by ``Component.foreign_pods``."""
    nodes: Mapping[str, Object | None] = field(default_factory=dict)
    """Nodes of pods that are not ready, by name; None: the node does not exist."""
    node_refusal: str = ""
    """Why the operator is not allowed to read nodes; empty: it is allowed."""
    largest: Mapping[str, Decimal] | None = None
    """The largest amount of each resource that one node has for pods; None: unknown, or no pod lacks one."""
    warnings: tuple[Object, ...] = ()
    """Events that explain missing or unready pods; some are about the claims of their volumes."""
    probed: Probed | None = None
    """Reports of the sidecars, which are probed after all steps were carried out; None before."""
    serves_pod_groups: bool = False
    """Whether the API server serves PodGroups; read only if there may be groups."""
    contested: Mapping[Ref, frozenset[Path]] = field(default_factory=dict)
    """Fields of children, or whole children, that another client keeps changing back."""
    referred: Object | None = None
    """The other LMCacheCluster that ``Component.referred`` names, if it exists."""
    users: tuple[Object, ...] = ()
    """Other LMCacheClusters that refer to this one; read only if ``Component.observes_users``."""
    autoscaling: Report | None = None
    """Latest report of the autoscaler on this cluster; None: no report yet."""
    now: datetime

    @property
    def name(self) -> str:
        """Name of the cluster."""
        return str(self.resource["metadata"]["name"])


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The steps that are due for one component. All are empty while the cluster matches its spec."""

    make: tuple[Object, ...] = ()
    """Secrets to create first, each with a random password. The operator cannot read Secrets, so it tries to
    create them even if they may exist."""
    apply: tuple[Object, ...] = ()
    """Children to write, prerequisites first."""
    lost: Mapping[Ref, list[Path]] = field(default_factory=dict)
    """Fields of children to apply that another client changed; the path () stands for a missing child."""
    delete: tuple[Ref, ...] = ()
    """Children that the spec no longer asks for."""
    evict: tuple[Object, ...] = ()
    """Pods to replace now."""
    resize: tuple[Resize, ...] = ()
    """Resize steps of running pods; pods whose resize is in progress come first."""
    num_starts: int = 0
    """Number of these pods that may start to grow."""
    abandon: tuple[Object, ...] = ()
    """Terminating pods on lost nodes, to delete by force."""
    problems: tuple[Problem, ...] = ()
    taken: tuple[Ref, ...] = ()
    """Wanted objects that belong to other owners, and that pods of the component would use. Until their names
    are free, the plan at most deletes all of a component that the spec no longer asks for."""
    due_seconds: float = math.inf
    """Time until the next step is due, even if nothing changes."""
    num_outdated: int = 0
    """Number of pods that still run a previous spec."""
    crash: str = ""
    """A container that failed once and starts again."""
    note: str = ""
    """A sentence for the user about a change that reaches a pod only when the pod is replaced."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Values that ``Component.status`` derives fields of the status from."""


_COMPLETE = Condition("False", "Complete", "")


@dataclass(frozen=True, kw_only=True)
class ComponentStatus:
    """A component's part of the cluster's status."""

    summary: str = ""
    """Contribution to the message of condition Ready."""
    serves: bool | None = None
    """Whether a pod of the component serves; None: requests need none. False makes the cluster unready."""
    progressing: Condition = _COMPLETE
    """Whether the component progresses towards its spec. The cluster shows the least complete component."""
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    """Conditions of this component, by type."""
    degraded: tuple[Problem, ...] = ()
    """Problems that degrade the cluster without making it unready."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the status."""
    events: tuple[Event, ...] = ()
    """Events about changes of these fields. The reconciler adds those about conditions."""
    awaits_sidecars: bool = False
    """Whether sidecars will change a condition soon. No watch reports that, so they are probed again."""


class Component(ABC):
    """Renders, plans and reports for one part of every cluster."""

    name: ClassVar[str]
    """Value of the component label, on its objects and on its pods."""
    kinds: ClassVar[tuple[str, ...]]
    """Kinds of the objects with the component's name (``names.object_name``), prerequisites first."""
    used: ClassVar[tuple[str, ...]] = ()
    """Names of the components whose objects it uses, too."""
    group_kinds: ClassVar[tuple[str, ...]] = ()
    """Kinds of the objects of each group of pods (``names.group_name``); empty: it has no groups."""
    changes_foreign_pods: ClassVar[bool] = False
    """Whether its objects change users' own pods. They are applied only if no component failed to plan, and
    none before it failed to apply."""
    renders_from_spec_only: ClassVar[bool] = True
    """Whether the spec alone decides which of ``refs`` it creates. If so, absent children need no read."""

    def refs(self, cluster_name: str) -> tuple[Ref, ...]:
        """References to every object that the component may ever create, prerequisites first.

        The names are fixed, so the operator finds an object even if its labels were removed. Secrets are left
        out, because the operator may not read them.
        """
        return tuple(Ref(kind, object_name(cluster_name, self.name)) for kind in self.kinds)

    def group_refs(self, resource: Object, children: Mapping[Ref, Object]) -> Iterable[Ref] | None:
        """References to the objects of all groups of pods that the spec asks for.

        None: no groups exist, so their objects need no list. ``children``: the existing objects of ``refs``.
        """
        return None

    def foreign_pods(self, cluster_name: str) -> str:
        """Label selector of users' own pods to report on; empty: none."""
        return ""

    def referred(self, resource: Object) -> str:
        """Name of another LMCacheCluster that this one uses; empty: none."""
        return ""

    def observes_users(self, resource: Object) -> bool:
        """Whether the component's status comes from the other LMCacheClusters that use this one."""
        return False

    def with_records(self, cluster: Cluster, observed: Observed) -> Cluster:
        """The cluster with what the component's own objects record. By default nothing is added.

        The status is no such record, because other users may be allowed to write it.
        """
        return cluster

    @abstractmethod
    def render(self, cluster: Cluster, context: Context) -> list[Object]:
        """The objects that the spec asks for, prerequisites first. Each is built by ``names.child``.

        Raises:
            InvalidSpecError: the spec can't be rendered.
        """

    @abstractmethod
    def plan(self, cluster: Cluster, observed: Observed, context: Context) -> Plan:
        """The steps that are due, usually the ``differences`` between rendered and observed objects.

        Raises:
            InvalidSpecError: the spec can't be rendered. The cluster then stays as it is.
        """

    def status(self, observed: Observed, plan: Plan) -> ComponentStatus:
        """The component's part of the cluster's status. By default empty."""
        return ComponentStatus()
