"""The component: a PodTemplate with what pods get that carry the label ``lmcache.io/inject: NAME``.

The API server itself adds it, by the chart's MutatingAdmissionPolicy: there is no webhook that could fail,
and pods get their cache also while the operator is down.
"""

from __future__ import annotations

from lmcache_operator.api.parse import Cluster
from lmcache_operator.components.base import Component, Context, Observed, Plan
from lmcache_operator.components.differences import differences
from lmcache_operator.components.injection.profile import profile
from lmcache_operator.specs import Object, names
from lmcache_operator.specs.kinds import Ref


class Injection(Component):
    """What other people's pods are given."""

    name = names.INJECTION

    def refs(self, cluster_name: str) -> tuple[Ref, ...]:
        """One."""
        return (Ref("PodTemplate", names.injection_name(cluster_name)),)

    def render(self, cluster: Cluster, context: Context) -> list[Object]:
        """With the images of today: pods that exist keep theirs."""
        name = names.injection_name(cluster.name)
        return [names.child(cluster, self.name, "PodTemplate", name, template=profile(cluster, context))]

    def plan(self, cluster: Cluster, observed: Observed, context: Context) -> Plan:
        """The differences."""
        return differences(self.render(cluster, context), observed)
