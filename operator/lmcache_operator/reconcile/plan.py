"""Plan: derives the due steps from the spec and the observed state. Pure: no client, no clock, no state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lmcache_operator.api.parse import parse
from lmcache_operator.contract.base import Component, Context, Observed, Plan
from lmcache_operator.contract.conditions import Problem
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.pods.differences import halted, unchanged
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import Ref


def plan(
    components: Sequence[Component], resource: Object, observed: Mapping[str, Observed], context: Context
) -> tuple[dict[str, Plan], Exception | None]:
    """Plans by component name, and an internal error of the operator if one occurred.

    If the spec is invalid, all components stay unchanged. If a component fails with an internal error, only
    this component stays unchanged. In both cases, terminating pods on lost nodes are deleted, because they
    block their replacements. The same happens to a component if an object that its pods use belongs to
    another owner, but a component that the spec no longer asks for is deleted.
    """
    plans: dict[str, Plan] = {}
    fault: Exception | None = None
    try:
        cluster = replace(parse(resource), platform=context.platform)
        for component in components:
            cluster = component.with_records(cluster, observed[component.name])
        for component in components:
            name = component.name
            try:
                plans[name] = component.plan(cluster, observed[name], context)
            except InvalidSpecError:
                raise
            except Exception as error:
                fault, plans[name] = error, unchanged(observed[name], internal_error(error))
    except InvalidSpecError as error:
        invalid = Problem("InvalidSpec", str(error))
        return {each.name: unchanged(observed[each.name], invalid) for each in components}, None
    conflicts = {name: each.taken for name, each in plans.items()}
    for each in components:
        if taken := [ref for name in (each.name, *each.used) for ref in conflicts.get(name, ())]:
            delete = _removed(plans[each.name], observed[each.name])
            plans[each.name] = replace(halted(plans[each.name]), taken=tuple(taken), delete=delete)
    return plans, fault


def _removed(plan: Plan, observed: Observed) -> tuple[Ref, ...]:
    """All objects of a component that the spec no longer asks for; empty if it asks for some of them."""
    wants_none = not (plan.apply or plan.taken)
    return plan.delete if wants_none and {*plan.delete} == observed.children.keys() else ()


def internal_error(error: Exception) -> Problem:
    """The problem that reports an internal error of the operator."""
    return Problem("InternalError", f"internal error of the operator, see its log: {error!r}")


def creates_something(plans: Mapping[str, Plan], observed: Mapping[str, Observed]) -> bool:
    """Whether the plans create an object that does not exist yet."""
    # ``Plan.lost`` has an entry for each child that the plan writes.
    return any(plans[name].lost.keys() - observed[name].children.keys() for name in plans)
