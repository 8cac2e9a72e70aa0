"""What a cluster is made of. A new capability of the operator is one more component here."""

from __future__ import annotations

from collections.abc import Iterable

from lmcache_operator.components.autoscaling import Autoscaling
from lmcache_operator.components.base import Component
from lmcache_operator.components.engine.engine import Engine
from lmcache_operator.components.injection.injection import Injection
from lmcache_operator.components.remote.remote import Remote
from lmcache_operator.specs.kinds import BY_NAME, Kind

COMPONENTS: tuple[Component, ...] = (Autoscaling(), Engine(), Injection(), Remote())
"""In the order in which they are applied and reported. What was chosen is written down before it is done."""


def kinds_of(components: Iterable[Component]) -> tuple[Kind, ...]:
    """Kinds of the objects that components may have: what is watched, and what the chart gives rights to."""
    names = dict.fromkeys(ref.kind for component in components for ref in component.refs("any"))
    return tuple(BY_NAME[name] for name in names)
