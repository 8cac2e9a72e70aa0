"""Thousands of random specs, valid and broken.

The operator neither stops nor loops on any of them, and names the field of each spec that it refuses.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
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


def check(runner: asyncio.Runner, seed: int, spec_dict: Any) -> bool:
    """Check the result of a spec, and return whether the operator refused it."""
    world, num_writes = runner.run(reconcile_until_settled(spec_dict))
    assert num_writes <= MAX_WRITES, f"seed {seed}: {world.writes}"
    conditions = {condition["type"]: condition for condition in world.resource["status"]["conditions"]}
    degraded = conditions["Degraded"]
    assert degraded["reason"] != "InternalError", f"seed {seed}: {degraded['message']}"
    if degraded["reason"] == "InvalidSpec":
        assert FIELD.match(degraded["message"]), f"seed {seed}: {degraded['message']}"
        assert not world.objects
        return True
    assert world.objects
    return False


def kind_in(generated: Any) -> str:
    engine = generated.get("engine") if isinstance(generated, dict) else None
    return str(engine.get("kind", "vLLM")) if isinstance(engine, dict) else ""


@pytest.mark.parametrize("thousand", [0, 1])
def test_random_specs_settle_or_are_refused_with_their_field(thousand: int) -> None:
    num_refused, kinds = 0, Counter[str]()
    with asyncio.Runner() as runner:
        for seed in range(1000 * thousand, 1000 * (thousand + 1)):
            generated, _ = spec(seed)
            is_refused = check(runner, seed, generated)
            num_refused += is_refused
            kinds[kind_in(generated)] += not is_refused
    # The generator must produce valid and invalid specs, otherwise the test proves nothing.
    assert 100 < num_refused < 900
    assert min(kinds["vLLM"], kinds["SGLang"]) > 50


def test_random_specs_with_init_containers_settle_or_are_refused() -> None:
    with asyncio.Runner() as runner:
        num_refused = sum(check(runner, seed, spec_of_init_container(seed)) for seed in range(500))
    assert 50 < num_refused < 450
