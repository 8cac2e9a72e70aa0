"""Children of a cluster that need no read: they do not exist, and the spec does not ask for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lmcache_operator.contract.base import Component, Observed, Plan
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import Ref, ref_of

_SECONDS = 3600.0
"""Time until all children are read again. Another program may create one meanwhile."""


@dataclass
class AbsentChildren:
    """Children of one cluster that the last reconciliation did not find and did not create.

    Most clusters use a third of the kinds that components may create. The spec decides which, so the answer
    holds for one generation of the cluster.
    """

    _refs: frozenset[Ref] = frozenset()
    _generation: int = 0
    _complete_at: float = -math.inf

    def known(self, resource: Object, now: float) -> frozenset[Ref]:
        """Return the children that need no read. ``now`` is a monotonic time in seconds."""
        generation = resource["metadata"].get("generation", 0)
        if generation != self._generation or now - self._complete_at >= _SECONDS:
            self._refs, self._generation, self._complete_at = frozenset(), generation, now
        return self._refs

    def note(
        self, components: Sequence[Component], observed: Mapping[str, Observed], plans: Mapping[str, Plan]
    ) -> None:
        """Remember the children that neither exist nor are planned, after all plans were applied.

        A plan that waits for a taken name says nothing about other children that the spec asks for.
        """
        self._refs = frozenset(
            ref
            for component in components
            if component.renders_from_spec_only and not plans[component.name].taken
            for ref in _absent(component, observed[component.name], plans[component.name])
        )

    def forget(self) -> None:
        """Make the next reconciliation read all children, because this one failed."""
        self._refs = frozenset()


def _absent(component: Component, observed: Observed, plan: Plan) -> Iterator[Ref]:
    due = {ref_of(child) for child in plan.apply}
    for ref in component.refs(observed.name):
        if not (ref in observed.children or ref in observed.taken or ref in observed.contested or ref in due):
            yield ref
