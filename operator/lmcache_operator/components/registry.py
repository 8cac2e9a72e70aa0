"""The components of every cluster. A new capability of the operator is a new component here."""

from __future__ import annotations

from collections.abc import Iterable

from lmcache_operator.components.autoscaling.component import Autoscaling
from lmcache_operator.components.engine.engine import Engine
from lmcache_operator.components.injection.injection import Injection
from lmcache_operator.components.peers.peers import Peers
from lmcache_operator.components.prefill.prefill import PrefillPods
from lmcache_operator.components.remote.remote import Remote
from lmcache_operator.components.router.router import Routing
from lmcache_operator.contract.base import Component
from lmcache_operator.specs.kinds import BY_NAME, Kind

COMPONENTS: tuple[Component, ...] = (
    Autoscaling(),
    Peers(),
    Engine(),
    PrefillPods(),
    Injection(),
    Remote(),
    Routing(),
)
"""Components in the order in which they are applied and reported.

Autoscaling comes first: the operator persists a chosen size before it applies it. Peers come before the pods
that mount their list and password.
"""


def kinds_of(components: Iterable[Component]) -> tuple[Kind, ...]:
    """Kinds of objects that components may create. The operator watches them, and its role allows them."""
    names = [name for each in components for name in (*(r.kind for r in each.refs("any")), *each.group_kinds)]
    return tuple(BY_NAME[name] for name in dict.fromkeys(names))
