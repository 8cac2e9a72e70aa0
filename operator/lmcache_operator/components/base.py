"""The contract of a component: one part of what a cluster is made of, such as its engine pods.

A component renders its objects from what is declared, plans its steps from what is observed of it, and says
how it does. It is pure: no client, no clock, no state; so ``render`` prints what ``run`` applies. Observing,
carrying out steps and merging conditions is the same for all and knows none of them by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from lmcache_operator.api.parse import Cluster
from lmcache_operator.components.differences import differences
from lmcache_operator.components.types import Context, Observed, Plan, Status
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import Ref


class Component(ABC):
    """Renders, plans and reports for one part of every cluster."""

    name: ClassVar[str]
    """Value of the component label, on its objects and on its pods."""

    @abstractmethod
    def refs(self, cluster_name: str) -> tuple[Ref, ...]:
        """Every object that it may have, wanted at present or not.

        The names are ours, so that none has to be searched for, also when its labels are gone.
        """

    @abstractmethod
    def render(self, cluster: Cluster, context: Context) -> list[Object]:
        """Its objects as they should be, prerequisites first, each made by ``names.child``: some of ``refs``.

        Raises:
            InvalidSpecError: the spec can't be rendered.
        """

    def plan(self, cluster: Cluster, observed: Observed, context: Context) -> Plan:
        """What is due: here what differs from what is rendered. At rest everything in it is empty.

        Raises:
            InvalidSpecError: the spec can't be rendered; then the cluster stays as it is.
        """
        return differences(self.render(cluster, context), observed)

    def status(self, observed: Observed, plan: Plan) -> Status:
        """What the cluster's status says of it: here nothing."""
        return Status()
