"""Plan: from what is and what should be to what has to be done. Pure: no client, no clock, no state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lmcache_operator.api.parse import parse
from lmcache_operator.components.base import Component, Context, Observed, Plan, Problem
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs import Object


def plan(
    components: Sequence[Component], resource: Object, observed: Mapping[str, Observed], context: Context
) -> dict[str, Plan]:
    """What is due for each component, by its name. With an invalid spec all stay as they are."""
    try:
        cluster = parse(resource)
        return {own.name: own.plan(cluster, observed[own.name], context) for own in components}
    except InvalidSpecError as error:
        invalid = Plan(problems=(Problem("InvalidSpec", str(error)),))
        return {own.name: invalid for own in components}


def creates_something(plans: Mapping[str, Plan], observed: Mapping[str, Observed]) -> bool:
    """Whether an object is due that is not there yet."""
    return any(plans[name].lost.keys() - observed[name].children.keys() for name in plans)
