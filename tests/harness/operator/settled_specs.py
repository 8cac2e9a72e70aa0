"""Reconciles a spec, and checks that it settles, or is refused with the name of the field."""

import asyncio
import re
from typing import Any, cast

from lmcache_operator.contract.base import Context
from lmcache_operator.kube.client import KubeApi
from lmcache_operator.reconcile.reconciler import Reconciler
from lmcache_operator.specs.kinds import ClusterKey
from lmcache_operator.specs.names import STOCK_IMAGES
from tests.harness.operator.model import NAME, NAMESPACE, UID, World, cluster

KEY = ClusterKey(NAMESPACE, NAME, UID)
MAX_WRITES = 5
"""Maximum writes for a spec in addition to the writes that create its children."""
FIELD = re.compile(r"spec\b|metadata\.name\b")


async def reconcile_until_settled(spec_dict: Any) -> tuple[World, int]:
    """Reconcile until nothing is written.

    Return the world, and the number of writes that created no child.
    """
    resource, num_writes = cluster() | {"spec": spec_dict}, 0
    world = World(resource)
    reconciler = Reconciler(cast(KubeApi, world), Context(STOCK_IMAGES), world.ask)
    while num_writes <= len(world.objects) + MAX_WRITES:
        world.writes.clear()
        await reconciler.reconcile(KEY)
        if not world.writes:
            break
        num_writes += len(world.writes)
        world.run_stateful_sets()
    return world, num_writes - len(world.objects)


def check(runner: asyncio.Runner, spec_dict: Any, name: str = "spec") -> bool:
    """Check the result of a spec, and return whether the operator refused it."""
    world, num_writes = runner.run(reconcile_until_settled(spec_dict))
    assert num_writes <= MAX_WRITES, f"{name}: {world.writes}"
    conditions = {condition["type"]: condition for condition in world.resource["status"]["conditions"]}
    is_refused = check_condition(conditions["Degraded"], name)
    assert bool(world.objects) != is_refused
    return is_refused


def check_condition(degraded: Any, name: str) -> bool:
    """Check that a refusal names its field. Return whether the operator refused the spec."""
    reason, message = degraded["reason"], degraded["message"]
    assert reason != "InternalError", f"{name}: {message}"
    assert reason != "InvalidSpec" or FIELD.match(message), f"{name}: {message}"
    return bool(reason == "InvalidSpec")
