"""The contract of a component: one part of what a cluster is made of, such as its engine pods.

A component renders its objects from what is declared, plans its steps from what is observed of it, and says
how it does. It is pure: no client, no clock, no state; so ``render`` prints what ``run`` applies. Observing,
carrying out steps and merging conditions is the same for all and knows none of them by name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, Literal, NamedTuple

from lmcache_operator.api.parse import Cluster
from lmcache_operator.autoscaling.report import Report
from lmcache_operator.components.reasons import Reason, Trouble
from lmcache_operator.specs import Images, Object
from lmcache_operator.specs.kinds import Ref
from lmcache_operator.specs.names import SHARD_IMAGE
from lmcache_operator.specs.ownership import Path


class Context(NamedTuple):
    """What shapes objects and is not the user's."""

    images: Images
    """By container, for clusters that name none."""
    operator_namespace: str = ""
    """Whose operator may reach the sidecars' metrics port; empty: no one's."""
    allow_all_gpus: bool = False
    """Whether sidecars may see all GPUs of their nodes, those of other pods included."""
    shard_image: str = SHARD_IMAGE
    """Of a managed remote tier's servers, for clusters that name none."""


class Problem(NamedTuple):
    """Something that stands in the way, and that the user, and nobody else, can remedy."""

    reason: Trouble
    message: str


class Condition(NamedTuple):
    """One aspect of the present state."""

    status: Literal["True", "False", "Unknown"]
    reason: Reason
    message: str
    generation: int | None = None
    """Of the spec that it was derived from; None: of the present one."""


class Event(NamedTuple):
    """Something that happened to a cluster."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


class RemoteFigures(NamedTuple):
    """What a sidecar counts of its remote tier, since it runs."""

    used_bytes: int = 0
    """Of all servers together; 0: they do not say."""
    evicted: int = 0
    """Values that these removed to make room."""


class LookupFigures(NamedTuple):
    """What a sidecar counts of what requests looked up, since it runs: tokens, and those that each tier
    had."""

    tokens: int = 0
    engine: int = 0
    """In the engine's own prefix cache."""
    memory: int = 0
    disk: int = 0
    remote: int = 0


class Sidecar(NamedTuple):
    """What the sidecar of a running pod says of itself."""

    pod: str = ""
    is_engine_ready: bool = False
    """Whether the pod is Ready."""
    answers: bool = True
    reason: str = ""
    """Why it is not ready; empty: it is."""
    is_attached: bool = False
    """Whether its engine uses it."""
    is_remote_reachable: bool | None = None
    """None: it has no remote tier, or does not say."""
    remote_reason: str = ""
    """Why it is not."""
    remote: RemoteFigures = RemoteFigures()
    lookups: LookupFigures = LookupFigures()
    is_disk_available: bool | None = None
    """None: it has no disk tier, or does not say."""
    disk_reason: str = ""
    """Why it is not."""
    transfer: str = ""
    """Who copies its engine's KV: CudaIPC or SharedMemory; empty: it has no engine, or does not say."""
    transfer_reason: str = ""
    """Why it is that."""
    is_memory_pinned: bool | None = None
    """Whether CUDA has pinned all of its memory tier that copies use; None: no GPU is used, or it does not
    say."""
    pin_problem: str = ""
    """Which process could not pin memory, and why."""
    memory_bytes: int | None = None
    """Of its memory tier, now; None: it follows no size, or does not say."""
    memory_target: int = 0
    """The size that it follows."""
    resize_problem: str = ""
    """Why the one is not the other."""


class Resize(NamedTuple):
    """One step of a running pod towards another size of its memory tier."""

    pod: Object
    num_bytes: int
    """Of the memory tier, in the end."""
    annotations: Mapping[str, str] | None = None
    """All that the operator has on the pod, from now on; None: as they are."""
    memory: Mapping[str, Any] | None = None
    """Limits and requests of the sidecar, from now on; None: as they are."""
    sidecar_bytes: int | None = None
    """Only if the sidecar says that its tier has no more, and gets no more; None: whatever it says."""
    is_start: bool = False
    """Whether the pod begins to grow."""


class Probed(NamedTuple):
    """What the sidecars of a cluster say."""

    sidecars: tuple[Sidecar, ...]
    is_certain: bool
    """False: one that did not answer may do so the next time, as it perhaps did before."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """A cluster, and what there is of one of its components."""

    resource: Object
    """The LMCacheCluster as the API server has it."""
    children: Mapping[Ref, Object] = field(default_factory=dict)
    """Objects of the component that the cluster owns."""
    taken: frozenset[Ref] = frozenset()
    """Names of children under which there is an object that the cluster does not own."""
    pods: tuple[Object, ...] = ()
    """Of its StatefulSets."""
    foreign_pods: tuple[Object, ...] = ()
    """Somebody else's, which ``Component.foreign_pods`` selects."""
    nodes: Mapping[str, Object | None] = field(default_factory=dict)
    """Those of pods that don't serve, by name; None: there is no such node."""
    node_refusal: str = ""
    """Why the operator may not look at nodes; empty: it may."""
    warnings: tuple[Object, ...] = ()
    """Events that say why pods are not there, or not ready; some are about the claims of their volumes."""
    probed: Probed | None = None
    """What the sidecars say; asked when all that is due has been done, None before."""
    contested: Mapping[Ref, frozenset[Path]] = field(default_factory=dict)
    """Fields of children, or whole ones, that somebody else keeps changing back."""
    referred: Object | None = None
    """The other LMCacheCluster that ``Component.referred`` names, if there is one."""
    users: tuple[Object, ...] = ()
    """The other LMCacheClusters that name this one in ``referred``, if ``Component.asks_users``."""
    autoscaling: Report | None = None
    """The latest of who watches what the cluster looks up; None: there is none, or none yet."""
    now: datetime

    @property
    def name(self) -> str:
        """Name of the cluster."""
        return str(self.resource["metadata"]["name"])


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is due for one component of a cluster. At rest everything in it is empty."""

    make: tuple[Object, ...] = ()
    """Secrets to make before anything, unless they exist: nobody reads them to see whether they do. Each gets
    a random password."""
    apply: tuple[Object, ...] = ()
    """Children to write, prerequisites first."""
    lost: Mapping[Ref, list[Path]] = field(default_factory=dict)
    """Fields of these that are not as we applied them: () for a child that is not there."""
    delete: tuple[Ref, ...] = ()
    """Children that are not wanted any more."""
    evict: tuple[Object, ...] = ()
    """Pods to replace now."""
    resize: tuple[Resize, ...] = ()
    """Running pods whose memory tier gets another size, those that have begun first."""
    num_starts: int = 0
    """How many of these may begin to grow."""
    abandon: tuple[Object, ...] = ()
    """Pods to delete by force: their nodes are gone."""
    problems: tuple[Problem, ...] = ()
    due_seconds: float = math.inf
    """After which more is due, even if nothing happens."""
    num_outdated: int = 0
    """Pods that still are what the user declared before."""
    note: str = ""
    """What reaches no pod before it is replaced for another reason: a sentence for the user."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the status that follow from what is declared."""


_COMPLETE = Condition("False", "Complete", "")


@dataclass(frozen=True, kw_only=True)
class Status:
    """What the cluster's status says of one component."""

    summary: str = ""
    """Says that it is as declared, where it is."""
    progressing: Condition = _COMPLETE
    """Whether it is on its way to what is declared. The cluster's is that of who has not arrived."""
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    """Conditions of its own, by their types."""
    degraded: tuple[Problem, ...] = ()
    """What is not as it should be and yet makes nothing unready."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """More fields of the status."""
    events: tuple[Event, ...] = ()
    """What of these fields is news, beside conditions."""


def former_conditions(resource: Object) -> dict[str, Condition]:
    """What the status of a cluster says at present, by the conditions' types."""
    before = (resource.get("status") or {}).get("conditions") or ()
    keys = ("status", "reason", "message", "observedGeneration")
    return {c["type"]: Condition(*(c[key] for key in keys)) for c in before if c.keys() >= set(keys)}


class Component(ABC):
    """Renders, plans and reports for one part of every cluster."""

    name: ClassVar[str]
    """Value of the component label, on its objects and on its pods."""
    is_for_others: ClassVar[bool] = False
    """Whether what it makes gets into other people's pods: only what the API server took as ours may."""

    @abstractmethod
    def refs(self, cluster_name: str) -> tuple[Ref, ...]:
        """Every object that it may have, wanted at present or not, prerequisites first.

        The names are ours, so that none has to be searched for, also when its labels are gone.
        """

    def foreign_pods(self, cluster_name: str) -> str:
        """A selector of other people's pods to report on, in the words of the API; empty: of none."""
        return ""

    def referred(self, resource: Object) -> str:
        """Name of another LMCacheCluster that this one relies on; empty: of none."""
        return ""

    def asks_users(self, resource: Object) -> bool:
        """Whether what it is like is known to the other LMCacheClusters that rely on it alone."""
        return False

    def sized(self, cluster: Cluster, observed: Observed) -> Cluster:
        """The cluster as all components are to render it: here as it is declared."""
        return cluster

    @abstractmethod
    def render(self, cluster: Cluster, context: Context) -> list[Object]:
        """Its objects as they should be, prerequisites first, each made by ``names.child``: some of ``refs``.

        Raises:
            InvalidSpecError: the spec can't be rendered.
        """

    @abstractmethod
    def plan(self, cluster: Cluster, observed: Observed, context: Context) -> Plan:
        """What is due: as a rule the ``differences`` from what is rendered.

        Raises:
            InvalidSpecError: the spec can't be rendered; then the cluster stays as it is.
        """

    def status(self, observed: Observed, plan: Plan) -> Status:
        """What the cluster's status says of it: here nothing."""
        return Status()
