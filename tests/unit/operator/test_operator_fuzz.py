"""Thousands of random specs, valid and broken: none stops the operator or keeps it busy, and each that is
refused is told by its field.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, cast

import pytest
from lmcache_operator.components.base import Context
from lmcache_operator.kube.client import KubeApi
from lmcache_operator.reconcile.reconciler import Reconciler
from lmcache_operator.specs.kinds import ClusterKey
from lmcache_operator.specs.names import STOCK_IMAGES

from tests.harness.operator_model import NAME, NAMESPACE, UID, World, cluster
from tests.harness.spec_fuzz import spec, spec_of_init_container

KEY = ClusterKey(NAMESPACE, NAME, UID)
MAX_WRITES = 5
"""Of one spec, beyond the one that makes each of its children."""
FIELD = re.compile(r"spec\b|metadata\.name\b")


async def reconcile_until_rest(made: Any) -> tuple[World, int]:
    """The world in the end, and how much was written that makes no child."""
    resource, num_writes = cluster() | {"spec": made}, 0
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


def check(runner: asyncio.Runner, seed: int, made: Any) -> bool:
    """Whether it was refused, as it should be if so."""
    world, num_writes = runner.run(reconcile_until_rest(made))
    assert num_writes <= MAX_WRITES, f"seed {seed}: {world.writes}"
    conditions = {found["type"]: found for found in world.resource["status"]["conditions"]}
    degraded = conditions["Degraded"]
    assert degraded["reason"] != "InternalError", f"seed {seed}: {degraded['message']}"
    if degraded["reason"] == "InvalidSpec":
        assert FIELD.match(degraded["message"]), f"seed {seed}: {degraded['message']}"
        assert not world.objects
        return True
    assert world.objects
    return False


@pytest.mark.parametrize("thousand", [0, 1])
def test_random_specs_come_to_rest_or_are_refused_by_their_field(thousand: int) -> None:
    num_refused = 0
    with asyncio.Runner() as runner:
        for seed in range(1000 * thousand, 1000 * (thousand + 1)):
            num_refused += check(runner, seed, spec(seed)[0])
    # Else the walk makes specs of one kind only, and this shows nothing.
    assert 100 < num_refused < 900


def test_so_do_specs_that_say_something_of_the_init_containers() -> None:
    with asyncio.Runner() as runner:
        num_refused = sum(check(runner, seed, spec_of_init_container(seed)) for seed in range(500))
    assert 50 < num_refused < 450
