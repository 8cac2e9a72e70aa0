"""Plan: from what is and what should be to what has to be done. Pure: no client, no clock, no state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lmcache_operator.api.parse import parse
from lmcache_operator.components.base import Component, Context, Observed, Plan, Problem
from lmcache_operator.components.nodes import abandoned, node_problems
from lmcache_operator.components.pods import pod_problems
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs import Object


def plan(
    components: Sequence[Component], resource: Object, observed: Mapping[str, Observed], context: Context
) -> tuple[dict[str, Plan], Exception | None]:
    """What is due for each component, by its name, and a fault of ours that was met.

    With an invalid spec all is left as it is, but pods of lost nodes, which would keep their successors from
    being made as they were; with a fault of ours, that of the component that has it.
    """
    plans: dict[str, Plan] = {}
    fault: Exception | None = None
    try:
        cluster = parse(resource)
        for own in components:
            cluster = own.sized(cluster, observed[own.name])
        for own in components:
            try:
                plans[own.name] = own.plan(cluster, observed[own.name], context)
            except InvalidSpecError:
                raise
            except Exception as error:
                fault, plans[own.name] = error, _left_alone(observed[own.name], internal_error(error))
    except InvalidSpecError as error:
        invalid = Problem("InvalidSpec", str(error))
        return {own.name: _left_alone(observed[own.name], invalid) for own in components}, None
    return plans, fault


def internal_error(error: Exception) -> Problem:
    """How a fault of ours is told."""
    return Problem("InternalError", f"a fault of the operator, see its log: {error!r}")


def _left_alone(observed: Observed, why: Problem) -> Plan:
    problems = (why, *node_problems(observed), *pod_problems(observed))
    return Plan(abandon=tuple(abandoned(observed)), problems=problems)


def creates_something(plans: Mapping[str, Plan], observed: Mapping[str, Observed]) -> bool:
    """Whether an object is due that is not there yet."""
    return any(plans[name].lost.keys() - observed[name].children.keys() for name in plans)
