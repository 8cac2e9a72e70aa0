"""What is known about a cluster at one moment: plain data, filled by the loop, read by the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from lmcache_operator.reconcile.contest import Contested
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import Ref
from lmcache_operator.specs.names import SPEC_HASH, engine_name


class Sidecar(NamedTuple):
    """What the sidecar of a pod that runs says of itself."""

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


class Heard(NamedTuple):
    """What the sidecars of a cluster say."""

    sidecars: tuple[Sidecar, ...]
    is_certain: bool
    """False: one that did not answer may do so the next time, as it perhaps did before."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """A cluster and everything that belongs to it."""

    resource: Object
    """The LMCacheCluster as the API server has it."""
    children: Mapping[Ref, Object] = field(default_factory=dict)
    """Objects that the cluster owns."""
    taken: frozenset[Ref] = frozenset()
    """Names of children under which there is an object that the cluster does not own."""
    pods: tuple[Object, ...] = ()
    """The engine's pods."""
    warnings: tuple[Object, ...] = ()
    """Events that say why pods are not there, or not ready."""
    heard: Heard | None = None
    """What the sidecars say; asked when all that is due has been done, None before."""
    contested: Contested = field(default_factory=dict)
    """Fields of children that somebody else keeps changing back."""
    now: datetime

    @property
    def name(self) -> str:
        """Name of the cluster."""
        return str(self.resource["metadata"]["name"])

    @property
    def stateful_set(self) -> Object | None:
        """The engine's StatefulSet."""
        return self.children.get(Ref("StatefulSet", engine_name(self.name)))


def is_ready(pod: Object) -> bool:
    """Whether a pod serves and is not on its way out."""
    conditions = pod.get("status", {}).get("conditions") or []
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


def annotations_of(live: Object) -> dict[str, str]:
    """An object's annotations; none when it has no such field."""
    return live["metadata"].get("annotations") or {}


def spec_hash_of(pod_or_template: Object) -> str | None:
    """What the user had declared when this pod, or this template, was made."""
    return annotations_of(pod_or_template).get(SPEC_HASH)
